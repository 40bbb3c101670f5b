"""Request bodies that must not reach the engine, and what makes them.

Each of `REFUSED` ended SGLang, stalled it, was answered with 500, or belongs to operators. proof/conformance/errors.py
has wrong types and ranges of single fields.
"""

from __future__ import annotations

from typing import Any

from .pictures import noise, picture

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 4}
CONTEXT = 8192
TOO_LONG = 16 * CONTEXT + 1


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"a": [value]}
    return value


def image(url: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


def schema(value: Any) -> dict[str, Any]:
    return {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def tagged(part: Any) -> dict[str, Any]:
    return {**CHAT, "response_format": {"type": "structural_tag", "format": part}}


def properties(number: int, length: int = 4) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{index:0{length}}": {"type": "string"} for index in range(number)}}


def tool(number: int, length: int) -> dict[str, Any]:
    return {"name": "f", "input_schema": properties(number, length)}


def tools(parameters: Any, *more: str, **fields: Any) -> dict[str, Any]:
    """A list of tools with these parameters: one `f`, and others by name."""
    declared = [{"name": name, "parameters": parameters, **fields} for name in ("f", *more)]
    return {"tools": [{"type": "function", "function": function} for function in declared]}


HIDDEN = {"type": "input_image", "image_url": picture(noise(200, 200))}
SEEN = {"type": "input_image", "image_url": picture(noise(1, 1)), "content": HIDDEN}
STREAM, SHOWN = {"stream": True, "max_completion_tokens": 8}, {"include": ["message.output_text.logprobs"]}
C, P, M, R = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
REFUSED: dict[str, tuple[str, Any, str]] = {
    "lone surrogate": (P, b'{"prompt": "\\ud800"}', "not JSON"),
    "depth bomb": (P, b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "not JSON"),
    "many prompts": (P, {"prompt": [[7] * 8000] * 33}, "have about 264000 tokens together, and 262144 are allowed"),
    "deep": (C, {**CHAT, "response_format": deep(30)}, "nests more than 48"),
    "pickle": (C, {**CHAT, "custom_logit_processor": "gASV"}, "custom_logit_processor is not for"),
    "batch times n": (P, {"prompt": ["x"] * 300, "n": 2}, "512 sequences"),
    "long text": (P, {"prompt": "x" * TOO_LONG}, "8192 tokens"),
    "long chat": (C, {"messages": [{"role": "user", "content": "x" * TOO_LONG}]}, "8192 tokens"),
    "many ids": (P, {"prompt": [1] * 8193}, "8193 tokens > 8192"),
    "logprobs": (P, {"prompt": "x", "logprobs": 10**9}, "less than or equal to 128"),
    **{
        f"logprobs of {asked} in an answer": (path, body, f"asks for {asked}: send fewer top_logprobs, a smaller max_t")
        for asked, path, body in (
            (8256, C, {**CHAT, "logprobs": True, "top_logprobs": 128, "max_tokens": 64}),
            (66560, C, {**CHAT, **STREAM, "logprobs": True, "top_logprobs": 127, "n": 65}),
            (8585, P, {"prompt": ["x"] * 5, "logprobs": 100, "max_tokens": 17}),
            (9696, P, {"prompt": ["x"] * 6, "logprobs": 100}),  # of 16 tokens
            (8400, R, {"input": "x", **SHOWN, "top_logprobs": 20, "max_output_tokens": 400}),
        )
    },
    "bias": (P, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "at most 4096"),
    "template": (C, {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs may"),
    "tokenize template": ("/v1/tokenize", {**CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs may"),
    "streamed tokens": ("/v1/tokenize", {"prompt": "x", "stream": True}, "stream: Input should be False"),
    **{
        f"image at {url}": (C, image(url), "fetches no media")
        for url in ({"url": "http://127.0.0.1/x"}, "http://169.254.169.254/x", {"url": "file:///etc"}, {"url": "/etc"})
    },
    "image in a tool's result": (M, {**MESSAGE, "messages": [{"role": "user", "content": [
        {"type": "tool_result", "content": [{"type": "image", "source": {"url": "http://x"}}]}]}]}, "fetches no media"),
    "an address beside data": (C, image({"type": "base64", "data": "AAAA", "url": "http://127.0.0.1/x"}),
        "fetches no media"),
    "media counted twice": (R,
        {"input": [{"role": "user", "content": [SEEN]}], "instructions": "x" * (TOO_LONG + 50_000)},
        "holds no other parts"),
    "a video": (C,
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": HIDDEN["image_url"]}}]}]},
        "content of type 'video_url'"),
    "responses image": (R, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "fetches no media"),
    "a tool is a text": (C, {**CHAT, "tools": ["f"]}, "tools.0: Input should be"),
    "choice of a tool that is a text": (R, {"input": "x", "tool_choice": {"type": "function", "function": "f"}},
        "tool_choice names no function"),
    "an answer that continues nothing": (C,
        {"messages": [{"role": "assistant", "content": "Mia"}], "continue_final_message": True},
        "needs a message before the one to continue"),
    "stop pattern": (C, {**CHAT, "stop_regex": "((.|\\s)+)+x"}, "stop_regex is not for clients"),
    "many stops": (P, {"prompt": "x", "stop": ["a"] * 65}, "stop has 65 entries"),
    "a long stop": (P, {"prompt": "x", "stop": "a" * 2000}, "stop is longer than 1024"),
    # Text wherever it stands.
    "data: in a text part": (C,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "data:" + "x" * TOO_LONG}]}]},
        " 8192 tokens"),
    "a system prompt": (M, {**MESSAGE, "system": "x" * TOO_LONG}, " 8192 tokens"),
    "names of properties": (M, {**MESSAGE, "tools": [tool(40, 4000)]}, " 8192 tokens"),
    "80,000 names": (M, {**MESSAGE, "tools": [tool(80_000, 6)]}, "has 80000 entries"),
    "5,000 names": (M, {**MESSAGE, "tools": [tool(5_000, 6)]}, "has 5000 entries"),
    "long prompts together": (P, {"prompt": ["x" * 100_000] * 20}, "exceed 65536 tokens"),
    "many empty objects": (R, b'{"input": [' + b"{}," * 200_000 + b"{}]}", "has 200001 entries"),
    "many messages": (C, {"messages": CHAT["messages"] * 5000}, "has 5000 entries"),
    # What cannot be compiled, and logprobs times positions.
    "many schemas in a tool": (C, {**CHAT, **tools({"anyOf": [{"anyOf": [{}] * 3000}] * 3})}, "8192"),
    "no schema": (P, {"prompt": "x", "json_schema": "{bad"}, "json_schema is not JSON"),
    "a count": (C, schema({"type": "array", "minItems": 2**31}), "minItems above 2147483647"),
    "another language": (C, tagged({"type": "grammar", "grammar": "a ::= a"}), "holds a grammar"),
    "a repeat of any part": (C, tagged({"type": "repeat", "min": 16, "max": 16, "content": {}}), "holds a repeat"),
    "logprobs of a prompt, twice": (P, {"prompt": "x" * 2000, "echo": True, "logprobs": 100, "n": 2},
        "positions times candidates"),
    "logprobs of an echo": (P, {"prompt": ["word " * 1000] * 60, "echo": True, "logprobs": 5},
        "positions times candidates"),
    "400 levels after a number": (C, b'{"messages": [], "stop": [1, ' + b"[" * 400 + b"]" * 400 + b"]}",
        "nests more than 48"),
    **{
        f"nothing to go on with in {path}": (
            path,
            {"messages": [*CHAT["messages"], {"role": "assistant", **said}], "continue_final_message": True},
            "a last message whose content is text",
        )
        for path, said in (
            (C, {"content": None, "reasoning_content": "x"}),
            ("/v1/tokenize", {"content": [{"type": "text", "text": "x"}]}),
        )
    },
    "meant": (C, {**CHAT, "guided_json": "x"}, "has no field 'guided_json'"),
    "another endpoint's": (C, {**CHAT, "max_new_tokens": 4}, "has no field 'max_new_tokens'"),
    "detokenize": ("/v1/detokenize", {"tokens": [[1], [-2]]}, "ids of the vocabulary"),
}  # fmt: skip

"""The attacks that once got through, by the numbers of the groups in which they were reported; they are sent first.

Group 3, a hostile Hub, is no request to an engine.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from .cases import TEMPLATES
from .requests import (
    CHAT,
    JSON,
    OUTSIDER,
    RESPONSES,
    Case,
    HttpRequest,
    Wire,
    chat_wire,
    json_request,
    question,
    wire_request,
)

_SLOW_PATTERN = r"((.|\s)+)+\x00"
# Quick to compile; the scheduler then took seconds for each token, because every way to read a text is kept.
_AMBIGUOUS = (
    "(((.)+[a-z0-9_]|([^a]){1,3})*){1,300}",
    r"(((a|[^a])*){1,300})+(([^a])+.|(\d){1,3})*",
    r"(([^a]|\d)*)*",
    "(([^a]+.)+.)+",
    "([a-z]+)*[0-9]",
)


_PNG, _IDAT = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAA", "AAAAC0lEQVR4nGNgwAEAABkAASXrHA4AAAAASUVORK5CYII="
_PICTURES = {
    "a header of 60,000 x 60,000": f"{_PNG}6mAAAOpgCAIAAAAPsOIV{_IDAT}",
    "one row of 28": f"{_PNG}ABwAAAAcCAIAAAD9b0jD{_IDAT}",
    "a signature": f"{_PNG[:-12]}",
    "two frames": (
        "data:image/gif;base64,R0lGODdhCAAIAIEAAAAA/wAAAAAAAAAAACwAAAAACAAIAAAIDwABCBxIsKDBgwgTKkwYEAAh+QQBAAABACwAAAAA"
        "CAAIAIH/AAAAAAAAAAAAAAAIDwABCBxIsKDBgwgTKkwYEAA7"
    ),
    "another server's": "http://169.254.169.254/latest/meta-data",
    "a right one, and no tower": f"{_PNG}AAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==",
}
_LETTERS = {"type": "regex", "pattern": "(a|b)*"}
_REPEATS = {"type": "repeat", "min": 16, "max": 16, "content": {"type": "star", "content": _LETTERS}}
_LOGPROBS = {"prompt": "Tom has 3 apples. " * 50, "echo": True, "logprobs": 100, "n": 100}
_SPACES = {"max_new_tokens": 2000, "regex": r"<\|tool_call_begin\|> {1900}"}
_AGENT = {"role": "assistant", "content": "Tom"}
_DEEP = '{"items":' * 880 + "{}" + "}" * 880
_ANSWER_LOGPROBS = {"logprobs": True, "top_logprobs": 128, "max_tokens": 400}


def corpus(model: str, port: int, keyed: bool) -> list[Case]:
    """The cases of an engine that serves `model` on `port`; keyed: its clients need a key."""
    return [
        *_ends_the_engine(model),
        *_opens_the_door(model, port, keyed),
        *_stops_everybody(model),
        *_breaks_an_answer(model),
        *_from_agents(model),
        *_rude_clients(model),
    ]


def _ends_the_engine(model: str) -> list[Case]:
    """1: values that pass a check of whole numbers and are coerced afterwards."""
    completion = {"model": model, "prompt": "Tom", "max_tokens": 2}
    logprob = {"text": "Tom has", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    no_number = _schema(model, {"type": "integer", "minimum": 5, "maximum": 2})
    return [
        _case(1, "a closed field at false", "/generate", {**logprob, "positional_embed_overrides": False}),
        _case(1, "a bias beyond float32", CHAT, question(model, logit_bias={"1": 1e39}), refused=True),
        _case(1, "logprob_start_len in a list", "/generate", {**logprob, "logprob_start_len": [1]}),
        _case(1, "top_logprobs_num in a list", "/generate", {**logprob, "top_logprobs_num": [5]}),
        _case(1, "top_logprobs as text", CHAT, question(model, logprobs=True, top_logprobs="5000"), refused=True),
        _case(1, "top_logprobs as a float", CHAT, question(model, logprobs=True, top_logprobs=5000.0), refused=True),
        _case(1, "logprobs, and no grammar", CHAT, {**no_number, "logprobs": True, "top_logprobs": 20}, refused=True),
        _case(1, "logprobs as text", "/v1/completions", {**completion, "logprobs": "1000000000"}, refused=True),
    ]


def _opens_the_door(model: str, port: int, keyed: bool) -> list[Case]:
    """2: an address that is claimed; 6: a door that is not there. From outside, without a key."""
    claimed = [("Host", "x"), ("Content-Type", "application/json"), ("X-Forwarded-For", f"127.0.0.1:{port}")]
    closed = {
        "/open_session": {"capacity_of_str_len": 1},
        "/configure_logging": {},
        "/update_weight_version": {"new_version": "fuzz"},
        "/flush_cache": {},
    }
    forged = [
        wire_request(
            "POST", path, [*claimed, *OUTSIDER], json.dumps(closed[path]).encode(), held_from=f"127.0.0.{number}"
        )
        for number, path in enumerate(closed, 3)
    ]
    chat = wire_request("POST", CHAT, claimed, json.dumps(question(model)).encode(), held_from="127.0.0.2")
    ajar = [
        Case("6 no door", path, (HttpRequest("POST", path, b"{}", JSON + OUTSIDER, key=False),), refused=True)
        for path in closed
    ]
    held = [Case("2 claimed address", path, (wire,), refused=True) for path, wire in zip(closed, forged, strict=True)]
    return [*held, Case("2 claimed address", f"{CHAT} without a key", (chat,), refused=keyed), *ajar]


@cache
def _stops_everybody(model: str) -> tuple[Case, ...]:
    """4, 5 and 7: little to send, much to do. Made once: it is 48 MB of JSON."""
    generate = {"text": "Tom", "sampling_params": {"max_new_tokens": 64, "stop_regex": _SLOW_PATTERN}}
    completion = {"model": model, "prompt": "Tom ", "max_tokens": 8}
    data = "data:" + "Tom has 3 apples. " * 450_000
    names = {f"property_{number}": {"type": "integer"} for number in range(80_000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": names}}}
    some = {f"p{number}": {"type": "integer"} for number in range(600)}
    schema = {"type": "object", "properties": some, "minProperties": 500}
    long = "Tom has 3 apples. " * 1600
    many = [_case(7, "", CHAT, _schema(model, {"const": number})).sends[0] for number in range(16)]
    large = json.dumps({"user": "x" * 28_000_000}).encode()  # a worker reads it, once for each endpoint
    sixfold = tuple(HttpRequest("POST", path, large) for path in [*TEMPLATES][:6])
    return (
        _case(4, "slow stop pattern", CHAT, question(model, max_tokens=64, stop_regex=_SLOW_PATTERN)),
        _case(4, "slow stop pattern", "/generate", generate),
        _case(
            5, "8 MB behind data:", "/v1/completions", {"model": model, "prompt": data, "max_tokens": 1}, refused=True
        ),
        _case(5, "8 MB behind data:", "/v1/tokenize", {"model": model, "prompt": data}, refused=True),
        _case(5, "80,000 names in a tool", CHAT, question(model, tools=[tool]), refused=True),
        _case(
            7,
            "128 logprobs from the first token",
            "/generate",
            {"text": long, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
            | {"logprob_start_len": 0, "top_logprobs_num": 128},
        ),
        *[_case(4, regex, "/v1/completions", {**completion, "regex": regex}) for regex in _AMBIGUOUS],
        *[_case(4, f"{regex} in a schema", CHAT, _schema(model, {"pattern": regex})) for regex in _AMBIGUOUS],
        _case(4, "a repeat of repeats", "/generate", _tag(_REPEATS), refused=True),
        _case(7, "lengths", CHAT, _schema(model, {"items": {"maxLength": 100}, "minItems": 100})),
        _case(5, "4,096 bare calls", RESPONSES, {"input": [{"type": "function_call"}] * 4096}),
        _case(5, "4,096 parts without text", RESPONSES, {"input": [_says([{"type": "input_text"}] * 4096)]}),
        Case(_NAMES[7], "16 grammars at once", tuple(many)),
        Case(_NAMES[5], "6 bodies of 28 MB that wait for a worker", sixfold, refused=True),
        _case(
            7, "names in a list", CHAT, _schema(model, {"required": [*names][:4096], "properties": []}), refused=True
        ),
        _case(7, "880 levels as text", "/v1/completions", {**completion, "json_schema": _DEEP}, refused=True),
        _case(7, "the logprobs of an answer", CHAT, question(model, **_ANSWER_LOGPROBS), refused=True),
        _case(7, "n times the logprobs of a prompt", "/v1/completions", {**completion, **_LOGPROBS}, refused=True),
        _case(7, "600 properties, 500 of them needed", CHAT, _schema(model, schema)),
    )


def _breaks_an_answer(model: str) -> list[Case]:
    """8: answers of 500, no answer to a half-closed client, and work before the key is looked at."""
    numbered = json.loads("[1," + "[" * 400 + "]" * 400 + "]")
    generate: dict[str, Any] = {"text": "Tom", "sampling_params": {"max_new_tokens": 2}}
    parts: tuple[list[Any], ...] = ([{"type": []}], [{}], [{"type": {}}])
    said = [
        _case(8, f"part {part}", path, {"model": model, "max_tokens": 2, "messages": [_says(part)]})
        for path in (CHAT, "/v1/messages")
        for part in parts
    ]
    wrong_key = HttpRequest("POST", "/flush_cache", b"", (("authorization", "Bearer not-a-key"), *OUTSIDER), key=False)
    named = HttpRequest("POST", CHAT, json.dumps(question(model)).encode(), (*JSON, ("x-override-rid", "one")))
    probes = (HttpRequest("GET", f"/health?{number}", leave_after_s=0.01, key=False) for number in range(20))
    sealed = [{"type": "reasoning", "summary": [], "encrypted_content": "A" * 4000}] * 84
    return [
        *said,
        Case("8 answers", "probes that leave", tuple(probes)),
        Case("8 answers", "/metrics is posted", (HttpRequest("POST", "/metrics", key=False),), refused=True),
        _case(8, "logprobs of token ids", "/generate", {**generate, "return_logprob": True, "token_ids_logprob": [1]}),
        _case(8, "thinking that nobody signed", RESPONSES, {"input": [*sealed, _says("Tom")], "max_output_tokens": 2}),
        _case(8, "spaces behind a marker", "/generate", {"text": "Tom", "sampling_params": _SPACES}),
        _case(8, "n is null", "/generate", {"text": "Tom", "sampling_params": {"n": None}}),
        _case(8, "a number before 400 levels", "/generate", {**generate, "input_ids": numbered}),
        _case(8, "a number before 400 levels", CHAT, question(model, stop=numbered)),
        Case("8 answers", "half-closed", (chat_wire(model, half_close=True, patience_s=10.0),)),
        Case("8 answers", "wrong key", (wrong_key,), refused=True),
        Case("8 answers", "a header sets the id", (named,) * 2),
    ]


def _from_agents(model: str) -> list[Case]:
    """9: what agents get wrong. Some of it is answered (docs/apis.md), none of it may be a 500 or keep a slot."""
    result = {"role": "tool", "tool_call_id": "functions.never:7", "content": "5"}
    tools = [_tool("f", {"type": "object"})]
    wanted = _schema(model, {"type": "object"})
    named = {"type": "function", "function": {"name": "g"}}
    refused: dict[str, dict[str, Any]] = {
        "a tool of an unknown type": {"tools": [_tool("f", {"type": "nope"})]},
        "a tool whose parameters are a list": {"tools": [_tool("f", [1])], "tool_choice": "required"},
        "a strict tool that cannot be held": {"tools": [_tool("f", {"uniqueItems": True}, strict=True)]},
        "a call of a tool that is not there": {"tools": tools, "tool_choice": named},
        "a call that must come, of no tool": {"tool_choice": "required"},
        "a schema and a call that must come": {**wanted, "tools": tools, "tool_choice": "required"},
        **{f"a picture: {name}": {"messages": [_says([_shown(url)])]} for name, url in _PICTURES.items()},
        "nothing to go on with": {
            "messages": [_says("Tom"), {"role": "assistant", "content": None}],
            "continue_final_message": True,
        },
        "one message, to go on with": {"messages": [_AGENT], "continue_final_message": True},
        "absurd max_tokens": {"max_tokens": 10**9},
        "absurd max_completion_tokens": {"max_completion_tokens": 2**40},
        "5,000 tools": {"tools": tools * 5000},
    }
    answered: dict[str, dict[str, Any]] = {
        "200 tools": {"tools": [_tool(f"f{index}", {"title": "long " * 30}) for index in range(200)]},
        "the result of an unknown call": {"messages": [_says("Tom"), result], "tools": tools},
        "a schema and tools": {**wanted, "tools": tools},
        "a schema without an end": _schema(model, {"properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
    }
    return [
        *(_case(9, name, CHAT, {**question(model), **body}, refused=True) for name, body in refused.items()),
        *(_case(9, name, CHAT, {**question(model), **body}) for name, body in answered.items()),
    ]


def _rude_clients(model: str) -> list[Case]:
    """Clients that leave, wait, come twice or say two things at once."""
    whole = chat_wire(model).pieces[0]
    long = json.dumps(question(model, stream=True, max_tokens=200, ignore_eos=True)).encode()
    named = HttpRequest("POST", CHAT, json.dumps(question(model, rid="one")).encode())
    response = {"model": model, "input": "Tom", "max_output_tokens": 2, "previous_response_id": "resp_x"}
    pieces = (whole[:-60], *(whole[at : at + 4] for at in range(len(whole) - 60, len(whole) - 8, 4)))
    crowd = (json_request("POST", CHAT, question(model, n=4, temperature=1.0, seed=7)),) * 8
    rude: dict[str, tuple[HttpRequest | Wire, ...]] = {
        "one id twice": (named, named),
        "abort storm": tuple(HttpRequest("POST", CHAT, long, leave_after_s=0.01 + 0.04 * at) for at in range(8)),
        "slow body": (Wire(pieces, pause_s=0.05),),
        "slow body, half-closed": (Wire(pieces, pause_s=0.05, half_close=True),),
        "pipeline": (Wire((whole.replace(b"Connection: close\r\n", b"") * 3 + whole,)),),
        "responses": (json_request("POST", RESPONSES, response), HttpRequest("POST", f"{RESPONSES}/resp_x/cancel")),
        "crowd": crowd,
    }
    return [Case("rude clients", name, sends) for name, sends in rude.items()]


def _shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(name: str, parameters: Any, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def _schema(model: str, schema: dict[str, Any]) -> dict[str, Any]:
    return question(model, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def _tag(part: dict[str, Any]) -> dict[str, Any]:
    tag = json.dumps({"type": "structural_tag", "format": part})
    return {"text": "Tom", "sampling_params": {"max_new_tokens": 8, "structural_tag": tag}}


def _says(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


_NAMES = {1: "1 coerced", 4: "4 patterns", 5: "5 sizes", 7: "7 allowed work", 8: "8 answers", 9: "9 agents"}


def _case(group: int, name: str, path: str, body: Any, refused: bool = False) -> Case:
    return Case(_NAMES[group], f"{path}: {name}", (HttpRequest("POST", path, json.dumps(body).encode()),), refused)

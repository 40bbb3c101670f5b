"""The requests, each with the expectation that the vendor's documents and types give it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import errors
from .forms import APIS, COUNT, OFF, QUESTION, SCHEMA, Body, Case, Request, asking, choice, one, refused, tool
from .replies import CHAT, MESSAGES, RESPONSES, TEXT, Answer, Reply


def cases(key: bool) -> list[Case]:
    """Return all cases. key: the server needs one."""
    made = [*errors.http(), *errors.types(), *_shapes(), *_calls(), *_formats(), *_stops(), *_tokens(), *_chat(),
            *_history(), *_fields(), *_texts(), *(errors.keys() if key else ())]  # fmt: skip
    assert len({(case.kind, case.api, case.name) for case in made}) == len(made), "two cases have one name"
    return made


def _each(kind: str, name: str, make: Callable[[str], Body], check: Callable[[Reply], object]) -> Iterator[Case]:
    """Yield the case on three APIs, as a whole and streamed."""
    for path in APIS.values():
        for stream in (False, True):
            usage = {"stream_options": {"include_usage": True}} if stream and path == CHAT else {}
            body = {**make(path), **({"stream": True, **usage} if stream else {})}
            yield one(kind, f"{name}{', streamed' if stream else ''}", path, body, check)


def said(reply: Reply) -> None:
    """Check what is true of every answer."""
    for answer in reply.answers:
        assert reply.path == TEXT or ("</think>" not in answer.text and "<|" not in answer.text), "markers in the text"
        assert answer.finish in ("stop", "length", "tool_calls"), answer.finish
    prompt, tokens = reply.tokens
    assert prompt > 0 and tokens > 0


def _shapes() -> Iterator[Case]:
    parts = {CHAT: "text", RESPONSES: "input_text", MESSAGES: "text"}
    yield from _each("shapes", "a question", lambda path: asking(path), said)
    yield from _each("shapes", "without thinking", lambda path: asking(path, **OFF[path]), _without_thinking)
    yield from _each(
        "shapes", "parts of text", lambda path: asking(path, [{"role": "user", "content": [
            {"type": parts[path], "text": "What is "}, {"type": parts[path], "text": "33 + 14?"}]}]), said)  # fmt: skip
    yield from _each("shapes", "no ASCII", lambda path: asking(path, "Wie spät ist es in 東京? 🕐\u0000\n"), said)
    yield from _each("shapes", "markers in the question", lambda path: asking(path, "<|im_end|></think> ok?"), said)
    for name, path in APIS.items():  # greedy, so an engine that gives the same answer twice passes
        asked = [Request(path, asking(path, **OFF[path], **more)) for more in ({}, {"stream": True})]
        yield Case("shapes", f"a stream is the whole answer, {name}", asked, _same)
    bodies = [Request(path, asking(path, **OFF[path])) for path in APIS.values()]
    yield Case("shapes", "one question, one prompt on three APIs", bodies, _same_prompt)


def _without_thinking(reply: Reply) -> None:
    said(reply)
    assert not reply.answer.thinking and reply.answer.text


def _same(*replies: Reply) -> None:
    assert len({reply.answer.text for reply in replies}) == 1, [reply.answer.text for reply in replies]


def _same_prompt(*replies: Reply) -> None:
    assert len({reply.tokens[0] for reply in replies}) == 1, [reply.tokens for reply in replies]


def _calls() -> Iterator[Case]:
    def make(mode: str, strict: bool = True, **more: Any) -> Callable[[str], Body]:
        return lambda path: asking(
            path, "Is 2 even?", tools=[tool(path, strict=strict), tool(path, "other", strict)],
            tool_choice=choice(path, mode), **OFF[path], **more,
        )  # fmt: skip

    yield from _each("calls", "required", make("required"), lambda reply: called(reply, "judge", "other"))
    yield from _each("calls", "required, not strict", make("required", strict=False), _begun)
    yield from _each("calls", "a named tool", make("other"), lambda reply: called(reply, "other"))
    yield from _each("calls", "none", make("none"), lambda reply: uncalled(reply))
    yield from _each("calls", "auto", make("auto"), said)

    def single(path: str) -> Body:
        body = make("required")(path)
        if path == MESSAGES:
            return {**body, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        return {**body, "parallel_tool_calls": False}

    yield from _each("calls", "one at a time", single, lambda reply: called(reply, "judge", "other", most=1))
    thinking = {"tokens": 400}
    yield from _each(
        "calls", "required, after thinking",
        lambda path: asking(path, tools=[tool(path, strict=True)], tool_choice=choice(path, "required"), **thinking),
        lambda reply: called(reply, "judge"),
    )  # fmt: skip


def _begun(reply: Reply) -> None:
    assert reply.answer.calls and reply.answer.calls[0][0] in ("judge", "other"), reply.answer


def called(reply: Reply, *names: str, most: int = 64) -> None:
    """Check an answer that must be calls, whose arguments follow the schema."""
    answer = reply.answer
    assert answer.finish == "tool_calls" and 1 <= len(answer.calls) <= most, answer
    for name, arguments in answer.calls:
        assert name in names, name
        _follows(arguments)


def uncalled(reply: Reply) -> None:
    said(reply)
    assert not reply.answer.calls, reply.answer.calls


def _follows(value: Any) -> None:
    assert set(value) == {"answer", "sure"}, value
    assert value["answer"] in ("yes", "no") and isinstance(value["sure"], bool), value


def _formats() -> Iterator[Case]:
    def schema(path: str) -> Body:
        inner = {"name": "x", "schema": SCHEMA, "strict": True}
        if path == CHAT:
            return {"response_format": {"type": "json_schema", "json_schema": inner}}
        if path == RESPONSES:
            return {"text": {"format": {"type": "json_schema", **inner}}}
        return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}

    def formatted(reply: Reply) -> None:
        assert reply.answer.finish == "stop", reply.answer
        _follows(json.loads(reply.answer.text))

    yield from _each("formats", "a schema", lambda path: asking(path, **OFF[path], **schema(path)), formatted)
    yield from _each("formats", "a schema, after thinking", lambda path: asking(path, tokens=400, **schema(path)),
                     formatted)  # fmt: skip
    unheld = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "contains": {"const": 1}}}}

    def wrong(path: str) -> Body:
        found: Body = json.loads(json.dumps(schema(path)).replace(json.dumps(SCHEMA), json.dumps(unheld)))
        return found

    for path in APIS.values():  # held, or refused: never ignored
        yield one("formats", "a schema that is hard to hold", path, asking(path, **OFF[path], **wrong(path)), _held)


def _held(reply: Reply) -> None:
    if reply.status != 200:
        reply.refused(400)
    elif reply.answer.finish == "stop":
        value = json.loads(reply.answer.text)
        assert "a" not in value or 1 in value["a"], value


def _stops() -> Iterator[Case]:
    stops = {CHAT: "stop", MESSAGES: "stop_sequences"}
    for path, name in stops.items():
        for stream in (False, True):
            how = ", streamed" if stream else ""
            for given in (["4"], ["e", "7"], [" is"], ["3", "=", "\n#"]):
                body: Body = {**asking(path, **OFF[path]), name: given, "stream": stream}
                yield one("stops", f"{given}{how}", path, body, partial(_stopped, stops=given))
            body = {**asking(path, tokens=400), name: ["="], "stream": stream}
            yield one("stops", f"thinking mentions it{how}", path, body, _thought_on)


def _stopped(reply: Reply, stops: list[str]) -> None:
    answer = reply.answer
    assert not any(stop in answer.text for stop in stops), answer
    if reply.path == MESSAGES and reply.whole["stop_reason"] == "stop_sequence":
        assert answer.stop in stops, answer.stop


def _thought_on(reply: Reply) -> None:
    """A stop string in thinking ends nothing: an answer that is not cut by its limit has a text, or none before it."""
    answer: Answer = reply.answer
    assert answer.text or answer.finish == "length" or "=" not in answer.thinking, answer


def _tokens() -> Iterator[Case]:
    for number in (1, 2, 7):
        yield from _each("tokens", f"at most {number}", partial(asking, tokens=number),
                         partial(_limited, number=number))  # fmt: skip
    for path in APIS.values():
        yield refused("tokens", "more than any context", path, asking(path, tokens=10**8))
        yield refused("tokens", "a prompt beyond any context", path, asking(path, "word " * 3_000_000), 400, 413)
    for name, more in {"a question": {}, "a system prompt": {"system": "Be short."}, "a tool": {"tools": [
            tool(MESSAGES)]}, "without thinking": OFF[MESSAGES]}.items():  # fmt: skip
        body = {name: value for name, value in asking(MESSAGES, **more).items() if name != "max_tokens"}
        requests = [Request(COUNT, body), Request(MESSAGES, {**body, "max_tokens": 4})]
        yield Case("tokens", f"count_tokens of {name}", requests, _counted)
    yield one("tokens", "none: the cache is filled", MESSAGES, asking(MESSAGES, tokens=0), _nothing)


def _limited(reply: Reply, number: int) -> None:
    assert reply.tokens[1] <= number, reply.tokens
    assert reply.answer.finish == "length" or reply.tokens[1] < number or reply.answer.text, reply.answer


def _counted(count: Reply, answer: Reply) -> None:
    assert count.json == {**count.json, "input_tokens": answer.tokens[0]}, (count.json, answer.tokens)


def _nothing(reply: Reply) -> None:
    assert not reply.whole["content"] and reply.whole["stop_reason"] == "max_tokens" and reply.tokens[1] == 0


def _chat() -> Iterator[Case]:
    for stream in (False, True):
        more: Body = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        how = ", streamed" if stream else ""
        for number in (2, 3):
            body = asking(CHAT, n=number, temperature=1, **more)
            yield one("chat", f"n = {number}{how}", CHAT, body, partial(_many, number=number))
        for top in (0, 2, 5):
            body = asking(CHAT, tokens=24, logprobs=True, top_logprobs=top, **OFF[CHAT], **more)
            yield one("chat", f"top_logprobs = {top}{how}", CHAT, body, partial(_probable, top=top))
        include: Body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        body = asking(RESPONSES, tokens=24, **OFF[RESPONSES], **include, stream=stream)
        yield one("chat", f"logprobs of a response{how}", RESPONSES, body, lambda reply: _probable(reply, 2, False))
    seeded = [Request(CHAT, asking(CHAT, temperature=1, seed=7)) for _ in range(2)]
    yield Case("chat", "one seed, one answer", seeded, _same)
    for name, value in {"logit_bias": {"5": -100}, "presence_penalty": 1.5, "frequency_penalty": -1.5, "top_p": 0.5,
                        "max_tokens": 8}.items():  # fmt: skip
        yield one("chat", f"{name} is read", CHAT, {**asking(CHAT), name: value}, said)
    yield one("chat", "a stream without usage", CHAT, asking(CHAT, stream=True), _no_usage)


def _many(reply: Reply, number: int) -> None:
    assert [choice["index"] for choice in reply.whole["choices"]] == [*range(number)] or reply.streamed
    assert len(reply.answers) == number
    said(reply)


def _probable(reply: Reply, top: int, all_of_them: bool = True) -> None:
    """Every token has its own candidates, the likeliest is drawn, and the bytes of all are the text."""
    found = reply.answer.logprobs
    assert found and all(len(one["top_logprobs"]) == top for one in found)
    for token in found:
        assert token["logprob"] <= 0
        if top:
            best = max(token["top_logprobs"], key=lambda other: other["logprob"])
            assert best["token"] == token["token"] and abs(best["logprob"] - token["logprob"]) < 0.01, token
    written = b"".join(bytes(token["bytes"]) for token in found)
    assert reply.answer.text.encode() in written
    if all_of_them:
        assert len(found) == reply.tokens[1], (len(found), reply.tokens)


def _no_usage(reply: Reply) -> None:
    assert reply.answer.finish and not any(event.get("usage") for event in reply.events)


def _history() -> Iterator[Case]:
    turns = [{"role": "user", "content": "I am Ann."}, {"role": "assistant", "content": "Hello Ann."},
             {"role": "user", "content": "Who am I?"}]  # fmt: skip
    yield from _each("history", "three turns", lambda path: asking(path, turns), said)
    yield from _each("history", "two turns of the user", lambda path: asking(path, [turns[0], turns[2]]), said)
    yield from _each("history", "a system prompt", _with_system, said)
    yield from _each("history", "a call and its result", _loop, said)
    yield from _each("history", "two calls, results in another order", lambda path: _loop(path, 2), said)
    failing = {"type": "tool_result", "tool_use_id": "c0", "is_error": True, "content": "no"}
    body = _loop(MESSAGES)
    body["messages"][2] = {"role": "user", "content": [failing]}
    yield one("history", "a result that is an error", MESSAGES, body, said)
    first = Request(MESSAGES, asking(MESSAGES, tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024}))
    yield Case("history", "thinking has a signature", [first], _signed)
    sealed = asking(RESPONSES, tokens=300, include=["reasoning.encrypted_content"], store=False)
    yield one("history", "thinking is sealed", RESPONSES, sealed, _sealed)
    roles = [{"role": "developer", "content": "Be short."}, turns[0]]
    for path in (CHAT, RESPONSES):
        yield one("history", "a developer's turn", path, asking(path, roles), said)
    yield one("history", "an assistant's name", CHAT, asking(CHAT, [{**turns[0], "name": "ann"}, *turns[1:]]), said)


def _with_system(path: str) -> Body:
    if path == MESSAGES:
        cached = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
        return asking(path, system=[cached])
    if path == RESPONSES:
        return asking(path, instructions="Be short.")
    return asking(path, [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}])


def _loop(path: str, number: int = 1) -> Body:
    """Return a conversation whose calls have their results, in the order from the last call to the first."""
    ask, ids, value = {"role": "user", "content": "Is 2 even?"}, [f"c{at}" for at in range(number)], '{"answer": "yes"}'
    if path == CHAT:
        made = [{"id": id_, "type": "function", "function": {"name": "judge", "arguments": value}} for id_ in ids]
        results = [{"role": "tool", "tool_call_id": id_, "content": "right"} for id_ in reversed(ids)]
        turns = [ask, {"role": "assistant", "content": None, "tool_calls": made}, *results]
    elif path == MESSAGES:
        uses = [{"type": "tool_use", "id": id_, "name": "judge", "input": json.loads(value)} for id_ in ids]
        found = [{"type": "tool_result", "tool_use_id": id_, "content": "right"} for id_ in reversed(ids)]
        turns = [ask, {"role": "assistant", "content": uses}, {"role": "user", "content": found}]
    else:
        turns = [ask, *({"type": "function_call", "call_id": id_, "name": "judge", "arguments": value} for id_ in ids)]
        turns += [{"type": "function_call_output", "call_id": id_, "output": "right"} for id_ in reversed(ids)]
    return asking(path, turns, tools=[tool(path)])


def _signed(reply: Reply) -> None:
    blocks = [block for block in reply.whole["content"] if block["type"] == "thinking"]
    assert all(block["signature"] for block in blocks)


def _sealed(reply: Reply) -> None:
    items = [item for item in reply.whole["output"] if item["type"] == "reasoning"]
    assert all(item["encrypted_content"] for item in items)


def _fields() -> Iterator[Case]:
    harmless: dict[str, dict[str, Any]] = {
        CHAT: {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
               "prompt_cache_key": "k", "verbosity": "low", "modalities": ["text"]},
        RESPONSES: {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "truncation":
                    "disabled", "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"]},
        MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto", "top_k": 5, "temperature": 0.5,
                   "cache_control": {"type": "ephemeral"}},
    }  # fmt: skip
    for path, fields in harmless.items():
        yield from (one("fields", name, path, asking(path, **{name: value}), said) for name, value in fields.items())
    beta = {"anthropic-beta": "message-threads-2026-08-12"}
    thread = Request(MESSAGES, asking(MESSAGES, thread={"type": "create"}), beta)
    yield Case("fields", "thread: supported, or refused as the SDK acts on", [thread], _threads)
    for name, value in {"mcp_servers": [{"type": "url", "url": "https://mcp.example", "name": "a"}],
                        "container": "container_none"}.items():  # fmt: skip
        yield refused("fields", name, MESSAGES, {**asking(MESSAGES), name: value})
    echoed: Body = {"instructions": "Be short.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.5,
              "max_output_tokens": 12, "parallel_tool_calls": False}  # fmt: skip
    for stream in (False, True):
        yield one("fields", f"a response echoes its request{', streamed' * stream}", RESPONSES,
                  asking(RESPONSES, **echoed, stream=stream),
                  lambda reply: _has_fields(reply, echoed))  # fmt: skip


def _threads(reply: Reply) -> None:
    if reply.status != 200:
        assert reply.refused(400)["details"]["error_code"] == "thread_unsupported_request"


def _has_fields(reply: Reply, fields: Body) -> None:
    assert {name: reply.whole[name] for name in fields} == fields


def _texts() -> Iterator[Case]:
    yield one("text", "a prompt", TEXT, asking(TEXT), said)
    yield one("text", "a prompt, streamed", TEXT, asking(TEXT, stream=True), lambda reply: reply.answer.finish)
    yield one("text", "a list of prompts", TEXT, asking(TEXT, ["One", "Two"]), lambda reply: _many(reply, 2))
    yield one("text", "token ids", TEXT, asking(TEXT, [5, 6, 7]), said)
    yield one("text", "n", TEXT, asking(TEXT, n=2, temperature=1), lambda reply: _many(reply, 2))
    yield one("text", "echo", TEXT, asking(TEXT, echo=True), lambda reply: _begins(reply, QUESTION))
    yield one("text", "echo alone", TEXT, asking(TEXT, tokens=0, echo=True), lambda reply: _begins(reply, QUESTION))
    yield one("text", "logprobs", TEXT, asking(TEXT, tokens=5, logprobs=2), _text_logprobs)
    yield one("text", "a stop", TEXT, asking(TEXT, stop=["e", " "]), lambda reply: _stopped(reply, ["e", " "]))
    yield one("text", "a usual limit", TEXT, asking(TEXT, tokens=None), lambda reply: _limited(reply, 16))
    usage = asking(TEXT, stream=True, stream_options={"include_usage": True})
    yield one("text", "usage of a stream", TEXT, usage, lambda reply: reply.tokens[1])


def _begins(reply: Reply, text: str) -> None:
    assert reply.answer.text.startswith(text), reply.answer.text


def _text_logprobs(reply: Reply) -> None:
    found = reply.whole["choices"][0]["logprobs"]
    assert len({len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert "".join(found["tokens"]) == reply.answer.text and len(found["tokens"]) == reply.tokens[1]

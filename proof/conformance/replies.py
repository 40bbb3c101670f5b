"""What a server answered, read by the vendors' own types: an answer as a whole or as events, or an error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

CHAT, RESPONSES, MESSAGES, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
_WHOLE = {CHAT: ChatCompletion, RESPONSES: Response, MESSAGES: Message, TEXT: Completion}
_EVENT = {CHAT: ChatCompletionChunk, RESPONSES: ResponseStreamEvent, MESSAGES: RawMessageStreamEvent, TEXT: Completion}
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


@dataclass
class Answer:
    """One answer in a form that all APIs share. finish: "stop", "length" or "tool_calls"."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str = ""
    stop: str | None = None
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Reply:
    """One reply. path: of the request, by which its form is known."""

    path: str
    status: int
    headers: httpx.Headers
    text: str
    streamed: bool = False

    @property
    def json(self) -> Any:
        """The body, or with a stream an error's."""
        return json.loads(self.text)

    def refused(self, *statuses: int) -> dict[str, Any]:
        """Return the error; fail unless the status is one of these and the form is the vendor's."""
        assert self.status in statuses, f"status {self.status}, expected {statuses}: {self.text[:200]}"
        assert isinstance(self.json, dict) and "error" in self.json, f"no error object: {self.text[:200]}"
        if self.path.startswith(MESSAGES):
            TypeAdapter(ErrorResponse).validate_json(self.text)
        else:
            _check(ErrorObject, self.json["error"])
        error: dict[str, Any] = self.json["error"]
        assert error["message"], "an error says what is wrong"
        return error

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Objects of a stream, in order."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers["content-type"]
        found = []
        for block in self.text.replace("\r\n", "\n").split("\n\n"):
            lines = dict(line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":"))
            if not lines or lines.get("data") == "[DONE]":
                continue
            event = json.loads(lines["data"])
            assert lines.get("event", event.get("type")) == event.get("type"), f"an event has two names: {block[:200]}"
            if event.get("type") != "ping":
                _check(_EVENT[self.path], _known(event))
                found.append(event)
        return found

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The answer as one object; that of a stream is put together from its events."""
        assert self.status == 200, f"status {self.status}: {self.text[:200]}"
        if not self.streamed:
            assert self.headers["content-type"].startswith("application/json"), self.headers["content-type"]
            _check(_WHOLE[self.path], _known(self.json))
            found: dict[str, Any] = self.json
            return found
        return {CHAT: _of_chunks, TEXT: _of_chunks, MESSAGES: _of_blocks, RESPONSES: _of_items}[self.path](self)

    @cached_property
    def answers(self) -> list[Answer]:
        """All answers of the request."""
        whole = self.whole
        if self.path == MESSAGES:
            return [_message(whole)]
        if self.path == RESPONSES:
            return [_response(whole)]
        return [_choice(choice) for choice in sorted(whole["choices"], key=lambda choice: choice["index"])]

    @property
    def answer(self) -> Answer:
        """The only answer."""
        [answer] = self.answers
        return answer

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answers."""
        usage = self.whole["usage"]
        if self.path in (CHAT, TEXT):
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            return usage["prompt_tokens"], usage["completion_tokens"]
        cached = 0 if self.path == RESPONSES else usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached, usage["output_tokens"]


def _check(kind: Any, value: Any) -> None:
    TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def _known(value: dict[str, Any]) -> dict[str, Any]:
    """Return an answer or event without what older types lack: new efforts, and text that has not ended yet."""
    if "response" in value:
        return {**value, "response": _known(value["response"])}
    if value.get("object") == "text_completion":
        return {**value, "choices": [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in
                                     value["choices"]]}  # fmt: skip
    return {**value, "reasoning": None} if "reasoning" in value else value


def _choice(choice: dict[str, Any]) -> Answer:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(
        message.get("content") or "", message.get("reasoning_content") or message.get("reasoning") or "", _read(calls),
        choice["finish_reason"], None, (choice.get("logprobs") or {}).get("content") or [],
    )  # fmt: skip


def _message(whole: dict[str, Any]) -> Answer:
    blocks = whole["content"]
    return Answer(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        _FINISH[whole["stop_reason"]], whole["stop_sequence"],
    )  # fmt: skip


def _response(whole: dict[str, Any]) -> Answer:
    items = whole["output"]
    texts = [part for item in items if item["type"] == "message" for part in item["content"]]
    thoughts = [part for item in items if item["type"] == "reasoning" for part in item.get("content") or ()]
    calls = _read([(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"])
    cut = whole["status"] == "incomplete"
    assert cut == ((whole.get("incomplete_details") or {}).get("reason") == "max_output_tokens")
    return Answer(
        "".join(part["text"] for part in texts), "".join(part["text"] for part in thoughts), calls,
        "length" if cut else "tool_calls" if calls else "stop", None,
        [one for part in texts for one in part.get("logprobs") or ()],
    )  # fmt: skip


def _read(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return calls with their arguments as objects; those of an answer that was cut may be none."""
    found: list[tuple[str, Any]] = []
    for name, arguments in calls:
        try:
            found.append((name, json.loads(arguments)))
        except ValueError:
            found.append((name, arguments))
    return found


def _of_chunks(reply: Reply) -> dict[str, Any]:
    """Put a stream of chat or text completions together."""
    assert reply.text.rstrip().endswith("data: [DONE]"), "a stream ends with [DONE]"
    events, choices = reply.events, dict[int, dict[str, Any]]()
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1, "heads of chunks differ"
    for given in (choice for event in events for choice in event["choices"]):
        choice = choices.setdefault(given["index"], {"index": given["index"], "finish_reason": None, "text": ""})
        assert choice["finish_reason"] is None, "a choice goes on after its end"
        choice["finish_reason"], choice["text"] = given["finish_reason"], choice["text"] + (given.get("text") or "")
        message = choice.setdefault("message", {"content": "", "reasoning_content": "", "tool_calls": []})
        if reply.path == TEXT:
            message["content"] = choice["text"]
        elif (given.get("logprobs") or {}).get("content"):
            choice.setdefault("logprobs", {"content": []})["content"] += given["logprobs"]["content"]
        delta = given.get("delta") or {}
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(message["tool_calls"]):
                assert part["id"] and part["function"]["name"], "a call begins with its id and name"
                message["tool_calls"].append({"function": {"name": part["function"]["name"], "arguments": ""}})
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    return {"choices": [*choices.values()], "usage": events[-1].get("usage")}


def _of_blocks(reply: Reply) -> dict[str, Any]:
    """Put a stream of Anthropic's events together: each block begins, goes on and ends before the next one."""
    events = reply.events
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    message, open_ = events[0]["message"], -1
    for event in events[1:-2]:
        block = message["content"][-1] if message["content"] else {}
        match event["type"]:
            case "content_block_start":
                assert open_ == -1 and event["index"] == len(message["content"]), "a block begins inside another one"
                open_ = event["index"]
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_, "a delta outside of its block"
                delta = dict(event["delta"])
                [(name, text)] = [(name, text) for name, text in delta.items() if name != "type"]
                name = "json" if name == "partial_json" else name
                block[name] = (block.get(name) or "") + text
            case "content_block_stop":
                assert event["index"] == open_, "another block ends"
                open_ = -1
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["json"] or "{}")
    assert open_ == -1, "a block does not end"
    return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}


def _of_items(reply: Reply) -> dict[str, Any]:
    """Return the response of the last event, once its items are those of the events before it."""
    events = reply.events
    assert [event["sequence_number"] for event in events] == list(range(len(events))), "numbers of events"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    whole: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert done == whole["output"] and added == [item["id"] for item in done], "items of the events and of the answer"
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == _response(whole).text, "text of the deltas and of the answer"
    return whole

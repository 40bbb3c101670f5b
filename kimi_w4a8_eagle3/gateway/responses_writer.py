"""Answers of /v1/responses, as a whole and as numbered events."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from .answer import Arguments, Called, CallEnd, Said, Thought
from .calls import object_in
from .generate import Delta, End
from .requests import ResponsesRequest
from .responses import INPUT, Declared
from .sealed import Seal
from .writer import Answerer, named


@dataclass
class _Item:
    """An item of the answer while it is written."""

    value: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class ResponsesWriter:
    """Writes responses. The thinking of an answer is sealed, because nothing is stored here."""

    def __init__(self, server: Answerer, seal: Seal, request: ResponsesRequest, declared: dict[str, Declared]) -> None:
        self._server, self._seal, self._request, self._declared = server, seal, request, declared
        self.id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._summary = (request.reasoning or {}).get("summary") is not None
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._end: End | None = None
        self._events = 0
        self._pending: list[dict[str, Any]] = []  # logprobs of the next text

    def begin(self) -> bytes:
        answer = self._answer("in_progress")
        return self._event("response.created", response=answer) + self._event("response.in_progress", response=answer)

    def delta(self, delta: Delta) -> bytes:
        self._pending += [self._server.logprob(one) for one in delta.logprobs]
        events = b"".join(self._piece(piece) for piece in delta.pieces)
        if delta.end is not None:
            self._end = delta.end
            events += self._close()
        return events

    def _piece(self, piece: object) -> bytes:
        match piece:
            case Thought(text):
                return self._reasoning(text)
            case Said(text):
                return self._message(text)
            case Called(_, name):
                return self._close() + self._call(name)
            case Arguments(_, text):
                assert self._open is not None
                self._open.texts.append(text)
                if self._open.value["type"] == "custom_tool_call":
                    return b""  # its input is known when it is whole
                return self._of_item("response.function_call_arguments.delta", delta=text)
            case CallEnd(_, whole):
                assert self._open is not None
                self._open.value["status"] = "completed" if whole else "incomplete"
                return self._close()
        raise AssertionError(piece)

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open.value["type"] != "reasoning":
            events = self._close() + self._added(
                {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [],
                 "encrypted_content": None, "status": "in_progress"}
            )  # fmt: skip
            if self._summary:
                part = {"type": "summary_text", "text": ""}
                events += self._of_item("response.reasoning_summary_part.added", summary_index=0, part=part)
        assert self._open is not None
        self._open.texts.append(text)
        if self._summary:
            return events + self._of_item("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return events + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _message(self, text: str) -> bytes:
        events = b""
        if self._open is None or self._open.value["type"] != "message":
            events = self._close() + self._added(
                {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "content": [],
                 "status": "in_progress"}
            )  # fmt: skip
            events += self._of_item("response.content_part.added", content_index=0, part=self._text_part(""))
        assert self._open is not None
        self._open.texts.append(text)
        news, self._pending = self._pending, []
        self._open.logprobs += news
        return events + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=news)

    def _call(self, name: str) -> bytes:
        of = self._declared.get(name, Declared(name))
        made: dict[str, Any] = {"call_id": f"call_{secrets.token_hex(12)}", "name": of.name}
        if of.custom:
            return self._added({"type": "custom_tool_call", "id": f"ctc_{secrets.token_hex(8)}", **made, "input": ""})
        made |= {"arguments": "", "status": "in_progress"}
        made |= {"namespace": of.namespace} if of.namespace else {}
        return self._added({"type": "function_call", "id": f"fc_{secrets.token_hex(8)}", **made})

    def _added(self, value: dict[str, Any]) -> bytes:
        self._open = _Item(value)
        self._items.append(self._open)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(value))

    def _close(self) -> bytes:
        item, events = self._open, b""
        if item is None:
            return b""
        text = "".join(item.texts)
        match item.value["type"]:
            case "reasoning":
                events = self._thought(item, text)
            case "message":
                part = self._text_part(text, item.logprobs)
                item.value |= {"content": [part], "status": "completed"}
                events = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
                events += self._of_item("response.content_part.done", content_index=0, part=part)
            case "function_call":
                item.value["arguments"] = text
                if item.value["status"] == "in_progress":
                    item.value["status"] = "incomplete"
                events = self._of_item("response.function_call_arguments.done", name=item.value["name"], arguments=text)
            case "custom_tool_call":
                item.value.pop("status", None)
                item.value["input"] = given = _input(text)
                events = self._of_item("response.custom_tool_call_input.delta", delta=given)
                events += self._of_item("response.custom_tool_call_input.done", input=given)
        events += self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item.value))
        self._open = None
        return events

    def _thought(self, item: _Item, text: str) -> bytes:
        item.value |= {"encrypted_content": self._seal.seal(text), "status": "completed"}
        item.value["content"] = [{"type": "reasoning_text", "text": text}]
        if not self._summary:
            return self._of_item("response.reasoning_text.done", content_index=0, text=text)
        part = {"type": "summary_text", "text": text}
        item.value["summary"] = [part]
        events = self._of_item("response.reasoning_summary_text.done", summary_index=0, text=text)
        return events + self._of_item("response.reasoning_summary_part.done", summary_index=0, part=part)

    @staticmethod
    def _text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}

    def finish(self) -> bytes:
        answer = self.whole()
        return self._event(f"response.{answer['status']}", response=answer)

    def whole(self) -> dict[str, Any]:
        assert self._end is not None
        cut = self._end.stop is not None and self._items and self._items[-1].value.get("status") == "incomplete"
        reason = "max_output_tokens" if self._end.reason == "length" else "stop" if cut else None
        return self._answer("incomplete" if reason else "completed", reason)

    def _answer(self, status: str, reason: str | None = None, error: dict[str, str] | None = None) -> dict[str, Any]:
        request, usage = self._request, self._end.usage if self._end is not None else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status,
            "model": self._server.model, "output": [item.value for item in self._items if item is not self._open],
            "error": error, "incomplete_details": {"reason": reason} if reason else None,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls, "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})}, "store": False,
            "temperature": request.temperature, "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto", "tools": _echoed(request.tools), "top_p": request.top_p,
            "truncation": "disabled", "user": request.user, "usage": usage and {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.answer,
                "output_tokens_details": {"reasoning_tokens": usage.thinking},
                "total_tokens": usage.prompt + usage.answer,
            },
        }  # fmt: skip

    def failed(self, body: bytes, message: str, code: str) -> bytes:
        error = {"code": code, "message": message}
        return self._event("response.failed", response=self._answer("failed", error=error))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.value["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return named({"type": kind, "sequence_number": self._events - 1, **fields})


def _input(arguments: str) -> str:
    """Return the input of a custom tool; a model that wrote bare text still makes a usable call."""
    found = (object_in(arguments) or {}).get(INPUT)
    return found if isinstance(found, str) else arguments


def _echoed(tools: list[Any] | None) -> list[Any]:
    """Return the plain functions of the request: clients read an answer with fewer kinds of tools than they send."""
    return [
        {"type": "function", "name": tool["name"], "description": tool.get("description"),
         "parameters": tool.get("parameters"), "strict": tool.get("strict") is True}
        for tool in tools or () if (tool.get("type") or "function") == "function"
    ]  # fmt: skip

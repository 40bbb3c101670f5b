"""Read streams of server-sent events, and assemble a chat answer: text, thinking, tool calls, finish reason, usage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_END = "data: [DONE]"
_LAST = ("message_stop", "response.completed", "response.incomplete")  # of messages and responses, which may lack _END


class EventReader:
    """Reader of one stream of server-sent events, from its text, however the text is cut.

    ended: True after the stream's last event.
    """

    def __init__(self) -> None:
        self._rest = ""
        self.ended = False

    def feed(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events that this text completes; raise ValueError when the server reports an error."""
        # splitlines and httpx's iter_lines would also cut at U+2028 and similar, which answers may contain.
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if self.ended:
                return
            if line.rstrip() == _END:
                self.ended = True
            elif line.startswith("data: "):
                event: Any = None
                with suppress(ValueError):
                    event = json.loads(line[6:])
                if not isinstance(event, dict):
                    raise ValueError(f"a line of the stream is no JSON object: {line[6:]!r:.80}")
                if error := event.get("error") or (event.get("response") or {}).get("error"):
                    raise ValueError(f"the server broke the answer off: {error}")
                self.ended = event.get("type") in _LAST
                yield event

    def close(self) -> None:
        """Raise ValueError if the stream ended early."""
        if not self.ended:
            raise ValueError("the stream ended without its last line")


def events(text: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a whole stream; raise ValueError as `EventReader` does."""
    reader = EventReader()
    for part in text:
        yield from reader.feed(part)
        if reader.ended:
            return
    reader.close()


@dataclass
class Reply:
    """The answer so far, with tool calls by index in OpenAI's form.

    verify: SGLang's `spec_tokens_details`, sent last if the request asks for it; empty without speculation.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)

    def add(self, piece: dict[str, Any]) -> None:
        choice = (piece.get("choices") or [{}])[0]
        self.usage = piece.get("usage") or choice.get("usage") or self.usage
        self.verify = (piece.get("sglext") or {}).get("spec_tokens_details") or self.verify
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            call = self.calls.setdefault(part.get("index") or 0, empty)
            call["id"] = call["id"] or part.get("id")
            for name, text in (part.get("function") or {}).items():
                call["function"][name] = call["function"].get(name, "") + (text or "")

    def message(self) -> dict[str, Any]:
        """Return the answer as a message for the conversation's history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return message

    def response(self) -> dict[str, Any]:
        """Return the answer in the form that the server sends to a client that does not stream."""
        choice = {"index": 0, "message": self.message(), "finish_reason": self.finish_reason}
        return {"object": "chat.completion", "choices": [choice], "usage": self.usage}

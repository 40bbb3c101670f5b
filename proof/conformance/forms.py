"""Requests of three APIs, and what is expected of their replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .replies import CHAT, MESSAGES, RESPONSES, TEXT, Reply

COUNT = f"{MESSAGES}/count_tokens"
APIS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
QUESTION = "What is 33 + 14?"
ABSENT = object()  # the value of a field that is left out
LIMIT = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens", TEXT: "max_tokens"}
OFF: dict[str, Any] = {
    CHAT: {"reasoning_effort": "none"}, RESPONSES: {"reasoning": {"effort": "none"}},
    MESSAGES: {"thinking": {"type": "disabled"}}, TEXT: {},
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"], "additionalProperties": False,
}  # fmt: skip
Body = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One request. A body that is an object gets the server's model unless it names one."""

    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True, eq=False)
class Case:
    """Requests, and what must be true of their replies. check: raises AssertionError, or what broken replies raise."""

    kind: str
    name: str
    requests: list[Request]
    check: Callable[..., object]

    @property
    def api(self) -> str:
        """The last word of the path, by which the table counts."""
        return next((name for name, path in APIS.items() if self.requests[0].path.startswith(path)), "other")


def asking(path: str, content: Any = QUESTION, tokens: int | None = 160, **more: Any) -> Body:
    """Return a request of one turn, answered greedily."""
    turn = content if isinstance(content, list) and path != TEXT else [{"role": "user", "content": content}]
    given: Body = {"prompt": content} if path == TEXT else {"input" if path == RESPONSES else "messages": turn}
    limit = {} if tokens is None else {LIMIT[path]: tokens}
    return {**given, **limit, "temperature": 0, **more}


def one(kind: str, name: str, path: str, body: Any, check: Callable[[Reply], object], **more: Any) -> Case:
    return Case(kind, name, [Request(path, body, **more)], check)


def refused(kind: str, name: str, path: str, body: Any, *statuses: int, **more: Any) -> Case:
    return one(kind, name, path, body, lambda reply: reply.refused(*(statuses or (400,))), **more)


def tool(path: str, name: str = "judge", strict: bool = False) -> Body:
    """Return a tool as the API declares it."""
    told = {"name": name, "description": "Judges a statement."}
    if path == MESSAGES:
        return {**told, "input_schema": SCHEMA, **({"strict": True} if strict else {})}
    function = {**told, "parameters": SCHEMA, "strict": strict}
    return {"type": "function", **(function if path == RESPONSES else {"function": function})}


def choice(path: str, mode: str) -> Any:
    """Return a tool choice: none, auto, required, or a tool's name."""
    if path == MESSAGES:
        kinds = {"none": "none", "auto": "auto", "required": "any"}
        return {"type": kinds[mode]} if mode in kinds else {"type": "tool", "name": mode}
    if mode in ("none", "auto", "required"):
        return mode
    return {"type": "function", "name": mode} if path == RESPONSES else {"type": "function", "function": {"name": mode}}

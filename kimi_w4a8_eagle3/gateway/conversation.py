"""What every API asks for: a conversation, the tools that it may call, and how its answer is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class Text:
    """A part of a message's content."""

    text: str


@dataclass(slots=True)
class Picture:
    """A part of a message's content: a picture as a `data:` URL."""

    url: str


Content = str | list[Text | Picture]


@dataclass(slots=True)
class Call:
    """A tool call of a past answer; `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """One turn. thinking and calls: of an assistant. call_id: the call that a tool's message answers."""

    role: Role
    content: Content = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def pictures(self) -> list[str]:
        """URLs of the pictures in the content."""
        return [] if isinstance(self.content, str) else [part.url for part in self.content if isinstance(part, Picture)]


@dataclass(slots=True)
class Tool:
    """A function that the client runs. strict: its arguments are held to the schema by a grammar."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass(slots=True)
class ToolChoice:
    """`name` forces one tool; "required" forces any; "none" declares none."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""


@dataclass(slots=True)
class Sampling:
    """How tokens are drawn. The ranges are the API's (endpoints.py); None leaves the engine's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    stops: tuple[str, ...] = ()
    n: int = 1


@dataclass(slots=True)
class Grammar:
    """A grammar that the answer after thinking must follow: one of /generate's fields, and its text."""

    kind: Literal["json_schema", "regex", "structural_tag"]
    text: str


@dataclass(slots=True)
class Conversation:
    """One request of a chat API, whichever it came by.

    thinking: the answer begins with thinking. continued: the last message is an answer to go on with.
    logprobs: candidates a token, or None for no logprobs. grammar: what the answer must follow, of format and tools.
    """

    messages: list[Message]
    sampling: Sampling
    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    thinking: bool = True
    effort: str | None = None
    template: dict[str, Any] = field(default_factory=dict)
    continued: bool = False
    format: Grammar | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    cache_salt: str | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call, and that the prompt declares."""
        if self.choice.mode == "none":
            return []
        return [tool for tool in self.tools if not self.choice.name or tool.name == self.choice.name]


def number_calls(messages: list[Message]) -> list[Message]:
    """Return the messages with the ids that Kimi writes: `functions.NAME:IDX`, counted over the conversation.

    Clients make ids of their own (`call_...`, `toolu_...`), and the model computes nonsense when it reads those. A
    result belongs to the first call of its id that has none yet in the turn before it.
    """
    count = 0
    latest: dict[str, str] = {}
    waiting: dict[str, list[str]] = {}
    numbered = []
    for message in messages:
        if message.role == "assistant" and message.calls:
            waiting, calls = {}, []
            for call in message.calls:
                written = f"functions.{call.name}:{count}"
                calls.append(replace(call, id=written))
                waiting.setdefault(call.id, []).append(written)
                latest[call.id] = written
                count += 1
            message = replace(message, calls=calls)
        elif message.role == "tool" and message.call_id in latest:
            given = message.call_id
            if waiting.get(given):
                latest[given] = waiting[given].pop(0)
            message = replace(message, call_id=latest[given])
        numbered.append(message)
    return numbered

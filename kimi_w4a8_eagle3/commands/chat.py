"""`kimi-w4a8 chat`: talk with a server; thinking is dimmed, tool calls run, and drafts are counted."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..base.errors import KimiError, UsageError
from ..chat import calculator
from ..door.settings import client_key
from ..engine.client import EngineClient
from ..engine.metrics import accept_length
from ..engine.reply import Reply
from .options import KEY_FILE

_MOST_ROUNDS = 32  # rounds of calls and results per question
_REQUEST = {"stream_options": {"include_usage": True}, "return_spec_tokens_details": True}


@dataclass
class Screen:
    """Display of a conversation: all of it on a terminal, only the answer in a pipe."""

    console: Console
    _dim: bool = False

    def text(self, piece: str, *, thought: bool = False) -> None:
        """Print the next piece of an answer; thinking is a paragraph of its own."""
        if thought and not self.console.is_terminal:
            return
        if piece and self._dim and not thought:
            self.console.print()
        self._dim = thought if piece else self._dim
        piece = piece.replace("\x1b", "\u241b")  # the model must not send escape sequences to the terminal
        self.console.print(piece, end="", style="dim" if thought else "", markup=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "dim") -> None:
        """Print a line between answers, on a terminal only."""
        if self.console.is_terminal:
            self.console.print(text, style=style, markup=False)

    def end(self, reply: Reply, seconds: float) -> None:
        """End the answer and print its status line."""
        self._dim = False
        if reply.content or self.console.is_terminal:
            self.console.print()
        self.line(status(reply, seconds))


def status(reply: Reply, seconds: float) -> str:
    """Return tokens, speed up to the last token, accept length, cached tokens, and truncation."""
    count = reply.usage.get("completion_tokens", 0)
    parts = [f"{count} tokens", f"{count / seconds:.1f} tok/s" if seconds else ""]
    steps = reply.verify.get("spec_verify_ct", 0)
    parts.append(f"accept length {accept_length(count, 1, steps):.2f}" if steps else "no speculation")
    cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    parts.append(f"{cached} of {reply.usage['prompt_tokens']} prompt tokens cached" if cached else "")
    parts.append("cut at the token limit" if reply.finish_reason == "length" else "")
    return ", ".join(filter(None, parts))


def answer(client: EngineClient, messages: list[dict[str, Any]], settings: dict[str, Any], screen: Screen) -> str:
    """Let the model answer, run its tool calls until it stops calling, append all to `messages`, and return the text.

    settings: fields of every request, with `tools` if the model may call the calculator.
    """
    for _ in range(_MOST_ROUNDS):
        reply, began = Reply(), time.monotonic()
        for piece in client.stream({"messages": messages, **settings, **_REQUEST}):
            said, thought = len(reply.content), len(reply.reasoning)
            reply.add(piece)
            screen.text(reply.reasoning[thought:], thought=True)
            screen.text(reply.content[said:])
        screen.end(reply, time.monotonic() - began)
        messages.append(reply.message())
        answered = calculator.results(messages[-1])
        if not answered:
            return reply.content
        for call, result in zip(messages[-1]["tool_calls"], answered, strict=True):
            screen.line(f"{result['name']}({call['function']['arguments']}) = {result['content']}", style="cyan")
        messages += answered
    raise KimiError(
        f"the model still calls tools after {_MOST_ROUNDS} rounds",
        where=client.base_url,
        remedy="rephrase the question, or add --no-tools",
    )


def chat(
    question: str = typer.Argument("", help="Ask this question and exit; default: standard input."),
    base_url: str = typer.Option("http://127.0.0.1:9527", "--base-url", help="The server."),
    system: str = typer.Option("", "--system", help="A system prompt."),
    temperature: float = typer.Option(1.0, "--temperature", min=0.0, help="Kimi's: 1.0 with thinking, 0.6 without."),
    max_tokens: int = typer.Option(4096, "--max-tokens", min=1, help="Longest answer, thinking included."),
    no_thinking: bool = typer.Option(False, "--no-thinking", help="Answer without thinking."),
    no_tools: bool = typer.Option(False, "--no-tools", help="Do not offer the calculator."),
    api_key_file: Path | None = KEY_FILE,
) -> None:
    """Talk with a server, or print only the answer in a pipe.

    Answers are streamed, thinking is dimmed, and tool calls run.
    """
    console = Console(highlight=False)
    settings: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    settings |= {"chat_template_kwargs": {"thinking": False}} if no_thinking else {}
    settings |= {} if no_tools else {"tools": [calculator.declaration()]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with EngineClient(base_url.rstrip("/").removesuffix("/v1"), client_key(api_key_file, os.environ)) as client:
        for asked in _questions(question, console, client.model_name):
            before = len(messages)
            messages.append({"role": "user", "content": asked})
            try:
                answer(client, messages, settings, Screen(console))
            except KeyboardInterrupt:  # drops only this question of a conversation, which continues
                if question or not sys.stdin.isatty():
                    raise
                del messages[before:]
                console.print("\nstopped", style="dim")


def _questions(question: str, console: Console, model: Callable[[], str]) -> Iterator[str]:
    """Yield the given or piped question, or typed ones until an empty line or the end of input."""
    if not question and not (sys.stdin and sys.stdin.isatty()):  # None: it is closed
        question = sys.stdin.buffer.read().decode(errors="replace").strip() if sys.stdin else ""
        if not question:
            raise UsageError("no question", "kimi-w4a8 chat", "a question as an argument, in a pipe, or on a terminal")
    if question:
        yield question
        return
    console.print(f"{model()}; an empty line exits", style="dim")
    while True:
        try:
            asked = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not asked:
            return
        yield asked

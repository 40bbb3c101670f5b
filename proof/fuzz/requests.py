"""What is sent: one request over a kept connection, or bytes on a socket of their own; and how to send it again."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = (("content-type", "application/json"),)
# Only web pages send it; on an engine without keys it is what tells an outsider from the operator on loopback.
OUTSIDER = (("origin", "https://fuzz.example"),)
KEY = "$KIMI_API_KEY"  # stands for the client's key in bytes, which may be written to a file

# A valid request may ask for minutes of work; that is load, not a fault, and would leave little time for others.
_MAX_TOKENS = 8
_MAX_N = 4
_LENGTHS = frozenset(
    ["max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "min_tokens", "min_new_tokens"]
)
# What the model reads. 5,000 digits in one of these kept a CPU busy for 20 s; the door refuses what is absurd.
_PROMPTS = frozenset(["prompt", "text", "messages", "system", "input", "instructions"])
_MAX_TEXT = 400
_ABSURD_TEXT = 200_000
_ABSURD = 1_000_000
_REFUSED_N = 512  # the door's limit: beyond it a number of answers is no work but a refusal


@dataclass(frozen=True)
class Request:
    """One HTTP request. leave_after_s: the client closes the connection then. key: with the client's key if any."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = JSON
    leave_after_s: float | None = None
    key: bool = True

    def command(self, base_url: str, file: Path) -> str:
        """Write the body to `file`; returns the shell command that sends the request again."""
        file.write_bytes(self.body)
        words = ["curl", "-sS", "-i", "-X", self.method]
        for name, value in self.headers:
            words += ["-H", f"{name}: {value}"]
        if self.leave_after_s is not None:
            words += ["-m", str(self.leave_after_s)]
        key = ' -H "Authorization: Bearer $KIMI_API_KEY"' if self.key else ""
        return shlex.join(words) + key + " " + shlex.join(["--data-binary", f"@{file}", base_url + self.path])


@dataclass(frozen=True)
class Wire:
    """Bytes for a socket, piece by piece, and how the client behaves.

    pause_s: between two pieces. half_close: says that it sends no more. patience_s: waits so long for (more of) an
    answer. held_from: an address of loopback from whose port, the engine's own number, a second connection is held.
    """

    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    half_close: bool = False
    patience_s: float = 0.5
    held_from: str | None = None

    def command(self, base_url: str, file: Path) -> str:
        """Write the bytes to `file`; returns the shell command that sends them in one piece, without the manners."""
        file.write_bytes(b"".join(self.pieces))
        return f"curl -sS -m 10 telnet://{base_url.removeprefix('http://')} < {shlex.quote(str(file))}"


@dataclass(frozen=True)
class Case:
    """What is sent at the same time, in which row of the table it counts, and whether an answer of 2xx is a fault."""

    group: str
    name: str
    sends: tuple[Request | Wire, ...]
    refused: bool = False


def json_request(method: str, path: str, body: Any, leave_after_s: float | None = None) -> Request:
    """A request with a JSON body that is `affordable`; an answer without a limit is not waited for.

    Lone surrogates stay what they are, as escapes, and so do NaN and Infinity.
    """
    if leave_after_s is None and isinstance(body, dict) and (_endless(body) or _endless(body.get("sampling_params"))):
        leave_after_s = 0.5
    return Request(method, path, json.dumps(affordable(body)).encode(), leave_after_s=leave_after_s)


def wire_request(
    method: str, path: str, headers: list[tuple[str, str]], body: bytes = b"", length: bool = True, **more: Any
) -> Wire:
    """A whole request as bytes, with headers exactly as given, of which any may be there twice."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([*lines, "Connection: close"]).encode("utf-8", "surrogatepass")
    return Wire((head + b"\r\n\r\n" + body,), **{"patience_s": 20.0, **more})


def affordable(body: Any) -> Any:
    """The body with lengths, numbers of answers and texts that are valid but expensive cut down; absurd ones stay."""
    if not isinstance(body, dict):
        return body
    return {name: _affordable(name, value) for name, value in body.items()}


def _endless(body: Any) -> bool:
    return isinstance(body, dict) and any(name in _LENGTHS and value is None for name, value in body.items())


def _affordable(name: str, value: Any) -> Any:
    if name in _LENGTHS:
        return _at_most(value, _MAX_TOKENS, _ABSURD)
    if name == "n":
        return _at_most(value, _MAX_N, _REFUSED_N)
    if name in _PROMPTS:
        return _short(value)
    if name == "sampling_params":
        return [affordable(each) for each in value] if isinstance(value, list) else affordable(value)
    return value


def _short(value: Any) -> Any:
    """The same, with each text in it cut."""
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value[:_MAX_TEXT] if isinstance(value, str) and len(value) < _ABSURD_TEXT else value


def _at_most(value: Any, limit: int, absurd: int) -> Any:
    """`limit` in the value's own type when it is a number, or a text that SGLang reads as one, in between."""
    if isinstance(value, list):
        return [_at_most(each, limit, absurd) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        expensive = limit < float(value) <= absurd
    except (ValueError, OverflowError):
        return value
    return type(value)(limit) if expensive else value

"""Requests over a kept connection, bytes on a socket, and the commands that send them again."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = (("content-type", "application/json"),)
# Only web pages send it. Without keys it is what tells an outsider from the operator on loopback.
OUTSIDER = (("origin", "https://fuzz.example"),)
KEY = "$KIMI_API_KEY"  # stands for the client's key in bytes, which may be written to a file
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

# A valid request may ask for minutes of work. That is load, not a fault, and would leave little time for others.
_LENGTHS = frozenset(
    ["max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "min_tokens", "min_new_tokens"]
)
_LIMITS = {**dict.fromkeys(_LENGTHS, (8, 1_000_000)), "n": (4, 512)}  # the most that is kept, and what is refused
_PROMPTS = frozenset(["prompt", "text", "messages", "system", "input", "instructions"])
_MAX_TEXT, _ABSURD_TEXT = 400, 200_000  # 5,000 digits in a prompt kept a CPU busy for 20 s


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request. leave_after_s: the client closes the connection then. key: with the client's key if any."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = JSON
    leave_after_s: float | None = None
    key: bool = True

    def command(self, base_url: str, file: Path) -> str:
        """Write the body to `file`, and return the shell command that sends the request again."""
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

    @property
    def body(self) -> bytes:
        """All bytes."""
        return b"".join(self.pieces)

    def command(self, base_url: str, file: Path) -> str:
        """Write the bytes to `file`, and return the command that sends them at once, without pauses."""
        file.write_bytes(self.body)
        return f"curl -sS -m 10 telnet://{base_url.removeprefix('http://')} < {shlex.quote(str(file))}"


@dataclass(frozen=True)
class Case:
    """Requests sent at the same time, the row of the table that counts them, and if an answer of 2xx is a fault."""

    group: str
    name: str
    sends: tuple[HttpRequest | Wire, ...]
    refused: bool = False

    @property
    def size(self) -> int:
        """Bytes sent."""
        return sum(len(send.body) for send in self.sends)


def json_request(method: str, path: str, body: Any, leave_after_s: float | None = None) -> HttpRequest:
    """Return a request with an `affordable` JSON body. The client leaves early if the answer has no limit.

    Lone surrogates stay what they are, as escapes, and so do NaN and Infinity.
    """
    if leave_after_s is None and isinstance(body, dict) and (_endless(body) or _endless(body.get("sampling_params"))):
        leave_after_s = 0.5
    return HttpRequest(method, path, json.dumps(affordable(body)).encode(), leave_after_s=leave_after_s)


def wire_request(
    method: str, path: str, headers: list[tuple[str, str]], body: bytes = b"", length: bool = True, **more: Any
) -> Wire:
    """Return a whole request as bytes, with headers exactly as given, which may repeat."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([*lines, "Connection: close"]).encode("utf-8", "surrogatepass")
    return Wire((head + b"\r\n\r\n" + body,), **{"patience_s": 20.0, **more})


def question(model: str, **fields: Any) -> dict[str, Any]:
    """Return a small chat request with these fields."""
    return {"model": model, "messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 4, **fields}


def chat_wire(model: str, **manners: Any) -> Wire:
    """Return a small chat request as bytes, from a client with these manners."""
    headers = [("Host", "x"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")]
    return wire_request("POST", CHAT, headers, json.dumps(question(model)).encode(), **manners)


def affordable(value: Any, name: str = "") -> Any:
    """Cut valid but expensive lengths, numbers of answers and prompts. Absurd ones, which are refused, stay."""
    if isinstance(value, list):
        return [affordable(item, name) for item in value]
    if isinstance(value, dict):
        return {key: affordable(item, name if name in _PROMPTS else key) for key, item in value.items()}
    if name in _PROMPTS and isinstance(value, str) and len(value) < _ABSURD_TEXT:
        return value[:_MAX_TEXT]
    if name not in _LIMITS or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    limit, absurd = _LIMITS[name]
    try:
        expensive = limit < float(value) <= absurd
    except (ValueError, OverflowError):
        return value
    return type(value)(limit) if expensive else value


def _endless(body: Any) -> bool:
    return isinstance(body, dict) and any(name in _LENGTHS and value is None for name, value in body.items())

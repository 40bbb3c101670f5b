"""Requests and bytes of a hostile client, the commands that send them again, and a sender that says what came back."""

from __future__ import annotations

import json
import re
import shlex
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from kimi_w4a8_eagle3.engine.client import bearer

JSON = (("content-type", "application/json"),)
# Only web pages send it. Without keys it is what tells an outsider from the operator on loopback.
OUTSIDER = (("origin", "https://fuzz.example"),)
KEY = "$KIMI_API_KEY"  # stands for the client's key in bytes, which may be written to a file
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ANSWER_WITHIN_S = 90.0  # a worker of the door may take 60
AT_ONCE = 24
_OVERLOAD = 503
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")

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

    def command(self, base_url: str, file: Path) -> str:
        """Write the bytes to `file`, and return the command that sends them at once, without pauses."""
        file.write_bytes(b"".join(self.pieces))
        return f"curl -sS -m 10 telnet://{base_url.removeprefix('http://')} < {shlex.quote(str(file))}"


@dataclass(frozen=True, repr=False)
class Case:
    """Requests sent at the same time. refused: an answer of 2xx is a fault."""

    group: str
    name: str
    sends: tuple[HttpRequest | Wire, ...]
    refused: bool = False

    def __repr__(self) -> str:
        return f"<{self.group}: {self.name}>"


def json_request(method: str, path: str, body: Any, leave_after_s: float | None = None) -> HttpRequest:
    """Return a request with an `affordable` JSON body. The client leaves early if the answer has no limit.

    Lone surrogates stay what they are, as escapes, and so do NaN and Infinity.
    """
    if leave_after_s is None and isinstance(body, dict) and (_endless(body) or _endless(body.get("sampling_params"))):
        leave_after_s = 0.5
    return HttpRequest(method, path, json.dumps(affordable(body)).encode(), leave_after_s=leave_after_s)


def wire_request(
    method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes = b"", length: bool = True, **more: Any
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


class Sender:
    """Sends cases to one server; used as a context manager. Each returns the statuses (0: no answer) and its faults."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        host, port = base_url.removeprefix("http://").split(":")
        self._address, self._key = (host, int(port)), bearer(api_key)
        self._key_on_the_wire = (api_key or "none").encode()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE, keepalive_expiry=2.0)
        self._http = httpx.Client(base_url=base_url, timeout=ANSWER_WITHIN_S, limits=limits, trust_env=False)
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()
        self._http.close()

    def send(self, cases: Sequence[Case]) -> list[tuple[Case, int, str]]:
        """Send all requests of the cases at once; return each one's case, its status and its fault or ""."""
        sent = [(case, what) for case in cases for what in case.sends]
        return list(self._pool.map(lambda one: (one[0], *self._judged(*one)), sent))

    def _judged(self, case: Case, what: HttpRequest | Wire) -> tuple[int, str]:
        try:
            status, text = self._either(what) if isinstance(what, HttpRequest) else self._wire(what)
        except httpx.TimeoutException:
            return 0, f"no answer within {ANSWER_WITHIN_S:.0f} s"
        except (httpx.HTTPError, OSError) as error:
            return 0, f"the connection broke: {error!r:.200}"
        if status >= 500 and status != _OVERLOAD:
            return status, f"HTTP {status}: {text[:500]}"
        if case.refused and 200 <= status < 300:
            return status, f"answered what must be refused: HTTP {status}: {text[:300]}"
        if 400 <= status < 500 and isinstance(what, HttpRequest) and what.method != "HEAD" and not message(text):
            return status, f"HTTP {status} without a message: {text[:300]}"
        return status, ""

    def _either(self, request: HttpRequest) -> tuple[int, str]:
        """Send over a kept connection, and once more if that ends without an answer.

        The server closes what was idle for 5 s, also with a request on its way (RFC 9112, 9.3.1).
        """
        try:
            return self._request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return self._request(request)

    def _request(self, request: HttpRequest) -> tuple[int, str]:
        headers = [*request.headers, *(self._key.items() if request.key else ())]
        patience = httpx.Timeout(ANSWER_WITHIN_S, read=request.leave_after_s or ANSWER_WITHIN_S)
        try:
            sent = {"content": request.body, "headers": headers, "timeout": patience}
            answer = self._http.request(request.method, request.path, **sent)  # type: ignore[arg-type]
        except httpx.ReadTimeout:
            if request.leave_after_s is None:
                raise
            return 0, ""
        return answer.status_code, answer.text

    def _wire(self, wire: Wire) -> tuple[int, str]:
        with ExitStack() as stack:
            if wire.held_from:
                held = stack.enter_context(socket.socket())
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((wire.held_from, self._address[1]))
                held.connect(self._address)
            connection = stack.enter_context(socket.create_connection(self._address, ANSWER_WITHIN_S))
            received = bytearray()
            with suppress(OSError):  # a server may cut broken HTTP short
                for number, piece in enumerate(wire.pieces):
                    time.sleep(wire.pause_s if number else 0)
                    connection.sendall(piece.replace(KEY.encode(), self._key_on_the_wire))
                if wire.half_close:
                    connection.shutdown(socket.SHUT_WR)
            until = time.monotonic() + wire.patience_s
            with suppress(OSError):
                while (left := until - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not (piece := connection.recv(65536)):
                        break
                    received += piece
        return max(map(int, _STATUS.findall(received)), default=0), received[:4096].decode(errors="replace")


def message(text: str) -> Any:
    """Return the message of a refusal in any form; empty without one."""
    try:
        answer = json.loads(text)
        while isinstance(answer, dict):
            answer = answer.get("error") or answer.get("message") or answer.get("detail")
    except ValueError:
        return text.strip()
    return answer

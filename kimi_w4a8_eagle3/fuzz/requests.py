"""One request of the fuzzer, and the command line that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON = {"content-type": "application/json"}

# A valid request may ask for minutes of work; that is load, not a fault, and would leave little time for others.
_MAX_TOKENS = 16
_MAX_N = 8
_LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_new_tokens",
    "max_output_tokens",
    "min_tokens",
    "min_new_tokens",
)
_DEFAULT_LENGTH = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@dataclass(frozen=True)
class FuzzRequest:
    """`raw`: bytes for the socket instead of a request that an HTTP library would send. leave: go after one piece."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: dict(JSON))
    leave: bool = False
    raw: bytes | None = None

    def command(self, base_url: str, file: Path) -> str:
        """Write what was sent to `file`; returns the shell command that sends it again."""
        file.write_bytes(self.body if self.raw is None else self.raw)
        if self.raw is not None:
            host, port = base_url.removeprefix("http://").split(":")
            return f"nc {host} {port} < {shlex.quote(str(file))}"
        words = ["curl", "-sS", "-i", "-X", self.method]
        for name, value in self.headers.items():
            words += ["-H", f"{name}: {value}"]
        return shlex.join([*words, "--data-binary", f"@{file}", base_url + self.path])


def json_request(method: str, path: str, body: Any, leave: bool = False) -> FuzzRequest:
    """A request with a JSON body; lone surrogates stay what they are, as escapes."""
    return FuzzRequest(method, path, json.dumps(affordable(path, body)).encode(), leave=leave)


def affordable(path: str, body: Any) -> Any:
    """The body with lengths and numbers of answers that are valid but expensive cut down; absurd ones stay."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if path in _DEFAULT_LENGTH and not any(name in body for name in _LENGTHS):
        body[_DEFAULT_LENGTH[path]] = _MAX_TOKENS
    for name in _LENGTHS:
        body[name] = _at_most(body[name], _MAX_TOKENS) if name in body else None
        if body[name] is None:
            del body[name]
    if "n" in body:
        body["n"] = _at_most(body["n"], _MAX_N)
    params = body.get("sampling_params")
    if isinstance(params, dict):
        body["sampling_params"] = affordable("", params)
    return body


def _at_most(value: Any, limit: int) -> Any:
    expensive = isinstance(value, int) and not isinstance(value, bool) and limit < value < 1_000_000
    return limit if expensive else value

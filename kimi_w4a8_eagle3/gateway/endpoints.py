"""The table of endpoints: one row each, from which requests are routed and the reference page is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from . import chat, completions, messages, requests, responses
from .errors import Vendor


@dataclass(frozen=True)
class Endpoint:
    """One path. who: every caller, or holders of a key. body: the fields that it reads.

    ping: what a stream gets while the model is silent.
    """

    path: str
    methods: tuple[str, ...] = ("POST",)
    who: Literal["everyone", "clients"] = "clients"
    body: type[requests.Body] | None = None
    vendor: Vendor = "openai"
    ping: bytes = b": ping\n\n"


_GET = ("GET", "HEAD")
_ROWS = (
    Endpoint(chat.PATH, body=requests.ChatRequest),
    Endpoint(responses.PATH, body=requests.ResponsesRequest),
    Endpoint(
        messages.PATH, body=requests.MessagesRequest, vendor="anthropic",
        ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    ),
    Endpoint(messages.COUNT_PATH, body=requests.CountRequest, vendor="anthropic"),
    Endpoint(completions.PATH, body=requests.CompletionRequest),
    *(Endpoint(path, body=requests.TokenizeRequest) for path in ("/tokenize", "/v1/tokenize")),
    *(Endpoint(path, body=requests.DetokenizeRequest) for path in ("/detokenize", "/v1/detokenize")),
    Endpoint("/v1/models", _GET),
    Endpoint("/metrics", _GET),
    Endpoint("/server_info", _GET, who="everyone"),
    Endpoint("/health", _GET, who="everyone"),
    Endpoint("/ready", _GET, who="everyone"),
    Endpoint("/", _GET, who="everyone"),
)  # fmt: skip
ENDPOINTS: Mapping[str, Endpoint] = {row.path: row for row in _ROWS}


def vendor_of(path: str) -> Vendor:
    """Return the vendor whose error form a path's clients read."""
    return "anthropic" if path.startswith(messages.PATH) else "openai"

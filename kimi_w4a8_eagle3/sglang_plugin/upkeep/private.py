"""Keep an engine to the process that started it: every path needs this start's secret. Its event loop shows its lag.

The gateway stands before clients. SGLang's own key lets OPTIONS, /health, /ready and /metrics pass, and as an argument
it stands in /proc. An engine that was given no folder is not kept private: `python -m sglang.launch_server` serves
SGLang's own API to everyone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...base.errors import KimiError, or_end
from ...engine.given_folder import engine_secret, given_folder
from ..hooks import Feature
from .pulse_hook import EventLoopWatch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from starlette.types import ASGIApp, Receive, Scope, Send

FEATURE = Feature(
    "the engine's secret",
    remove_when="SGLang reads a key from a file and asks for it on every path",
)
_REFUSED = b'{"error": {"message": "this engine answers only requests with its secret", "code": 401}}'
# Each of these serves HTTP where the check of the secret does not run.
_ELSEWHERE = (("tokenizer_worker_num", 1), ("grpc_port", None), ("enable_http2", False))


class Private:
    """ASGI middleware that answers 401 without the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._expected = app, f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(sent, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})


@FEATURE.around("sglang.srt.entrypoints.http_server._setup_and_run_http_server")
def keep_private(original: Callable[..., object], server_args: ServerArgs, *args: object, **kwargs: object) -> object:
    """Serve with the secret, which SGLang's own warm-up request sends, too; do nothing without a given folder."""
    secret = engine_secret(given_folder())
    if secret is None:
        return original(server_args, *args, **kwargs)
    with or_end("the engine cannot be kept private"):
        for name, value in _ELSEWHERE:
            if getattr(server_args, name, value) != value:
                raise KimiError(
                    f"--{name.replace('_', '-')} serves HTTP where the engine's secret is not checked",
                    where="the engine's arguments",
                    remedy="leave it out",
                )
        # SGLang's import order: complete once it serves
        from sglang.srt.entrypoints import http_server
        from sglang.srt.runtime_context import get_serving

        http_server.app.add_middleware(EventLoopWatch)
        http_server.app.add_middleware(Private, secret=secret)
    with get_serving().override(api_key=secret):
        return original(server_args, *args, **kwargs)

"""A proxy that passes requests on to a server and writes each with a body to a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..load.asgi import served_app

_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_TIMEOUT_S = 3600.0


class RecordingProxy:
    """Requests of one session: the file gets {"path", "body", "status"} for each POST."""

    def __init__(self, base_url: str) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S)
        self.file: Path | None = None
        self.app = Starlette(
            routes=[Route("/{path:path}", self._pass, methods=["GET", "POST", "HEAD", "PUT", "DELETE"])]
        )

    async def _pass(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        asked = self._client.build_request(
            request.method, request.url.path, params=request.query_params, content=body, headers=headers
        )
        answer = await self._client.send(asked, stream=True)
        pieces: list[bytes] = []
        if body and self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(_row(request, body, answer.status_code)) + "\n")

        async def streamed() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_bytes():
                pieces.append(piece)
                yield piece
            if answer.status_code >= 400 and self.file is not None:
                with self.file.with_suffix(".refused").open("ab") as file:
                    file.write(request.url.path.encode() + b" " + b"".join(pieces) + b"\n")

        kept = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return StreamingResponse(streamed(), answer.status_code, kept)


def _row(request: Request, body: bytes, status: int) -> dict[str, Any]:
    try:
        return {"path": request.url.path, "status": status, "body": json.loads(body)}
    except ValueError:
        return {"path": request.url.path, "status": status, "body": None}


@contextmanager
def recording(base_url: str) -> Iterator[tuple[str, RecordingProxy]]:
    """Serve a recorder in front of `base_url` on loopback; yields its address and itself."""
    recorder = RecordingProxy(base_url)
    with served_app(recorder.app) as url:
        yield url, recorder

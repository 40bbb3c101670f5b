"""A web server on loopback that nothing should ever ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..load.asgi import served_app


@contextmanager
def trap(on_request: Callable[[str], object]) -> Iterator[str]:
    """Yield an address on it. on_request(path) is called in a thread of its own for each request."""

    def asked(request: Request) -> Response:
        on_request(request.url.path)
        return Response(status_code=404)

    with served_app(Starlette(routes=[Route("/{path:path}", asked)])) as url:
        yield f"{url}/trap.png"

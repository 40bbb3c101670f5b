"""A web server on loopback that nothing should ever ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def trap(on_request: Callable[[str], object]) -> Iterator[str]:
    """Yield an address on it. on_request(path) is called from a thread of its own for each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            on_request(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="trap", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/trap.png"
    finally:
        server.shutdown()
        server.server_close()

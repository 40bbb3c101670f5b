"""A small HTTP server on loopback for the time of a test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (path, body) -> status, content and, for a redirection, its place
Answer = Callable[[str, bytes], tuple[int, bytes] | tuple[int, bytes, str]]


class LoopbackServer(ThreadingHTTPServer):
    """HTTP server whose clients may be killed: a reset connection is not an error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that answers every request by a function, each in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, *location = answer(self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for place in location:
                self.send_header("Location", place)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = LoopbackServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

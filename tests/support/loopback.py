"""A small HTTP server on loopback for the time of a test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

# (path, body) -> status, content and, for a redirection, its place
Answer = Callable[[str, bytes], tuple[int, bytes] | tuple[int, bytes, str]]


class LoopbackServer(ThreadingHTTPServer):
    """HTTP server that answers in threads until it is closed. A client may be killed: a reset is not an error."""

    daemon_threads = True

    def __init__(self, handler: type[Handler], host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), handler)
        self.base_url = f"http://{host}:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Handler without a log. `send` answers with a body and its length, HEAD without the body."""

    def log_message(self, *args: object) -> None: ...

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that answers every request by a function, each in a thread of its own."""

    class Answering(Handler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, *location = answer(self.path, body)
            self.send(status, content, {"location": location[0]} if location else {})

        do_POST = do_GET

    with LoopbackServer(Answering) as server:
        yield server.base_url

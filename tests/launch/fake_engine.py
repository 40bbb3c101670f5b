"""An engine of the fake docker: answers /ready on PORT with 503, then with 200, and ends."""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ANSWERS = [(503, b'{"ready": false, "phase": "loading", "reason": "weights"}'), (200, b'{"ready": true}')]


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def start(port: int) -> None:
    """Return once a child listens on `port`; it ends after both answers, or after ten seconds without a request."""
    server = HTTPServer(("127.0.0.1", port), Ready)
    if os.fork():
        return
    os.setsid()
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    server.timeout = 10
    for _ in range(len(ANSWERS)):
        server.handle_request()
    os._exit(0)


if __name__ == "__main__":
    start(int(sys.argv[1]))

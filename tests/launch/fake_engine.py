"""Ask the fake docker's daemon, which is the test, to start the ops endpoint of an engine on PORT."""

from __future__ import annotations

import json
import os
import socket
import sys


def start(port: int) -> None:
    """Return once the endpoint listens; it says that the engine starts."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.connect(os.environ["FAKE_DOCKER"] + "/daemon")
        daemon.sendall(json.dumps({"engine": port}).encode() + b"\n")
        daemon.makefile().readline()


if __name__ == "__main__":
    start(int(sys.argv[1]))

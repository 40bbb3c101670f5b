"""An ASGI application on loopback for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from kimi_w4a8_eagle3.base.connections import BoundedProtocol
from kimi_w4a8_eagle3.engine.process import free_port


@contextmanager
def served_app(app: Any, port: int | None = None) -> Iterator[str]:
    """The address at which `app` answers, on `port` or a free one."""
    port = port or free_port()
    # A connection may rest as long as the slowest worker pauses, so no client meets one that is just being closed.
    config = uvicorn.Config(
        app, port=port, http=BoundedProtocol, log_config=None, lifespan="off", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=20)

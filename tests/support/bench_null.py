"""A null server with the built-in model's tokenizer, for tests of the benchmark."""

from __future__ import annotations

from typing import Any

from laptop import tiny
from proof.load.null_server import NullServer, Settings

NUM_PROMPTS = 6
KEY = "a-key-for-the-null-server"


def serve(**settings: Any) -> NullServer:
    """Listening on a free port; end it with `shutdown()`."""
    server = NullServer(0, Settings(tokenizer=str(tiny.target_path()), **settings))
    server.start()
    return server

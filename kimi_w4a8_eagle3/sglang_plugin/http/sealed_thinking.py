"""Thinking as an opaque text, for clients that keep the conversation: `encrypted_content` and `signature`.

The server's key for clients authenticates it, so all replicas read it, also after a restart. It is not secret: an
answer has the thinking beside it. SGLang's own form is compressed, and 41 kB of it inflate to 30 MiB.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from functools import cache

from ...door.settings import read_door

_PREFIX = "kimi-thinking-v1."


def sealed(thinking: str) -> str:
    """Return a text that only a server with this key reads."""
    data = thinking.encode(errors="surrogatepass")
    return _PREFIX + base64.urlsafe_b64encode(_digest(data) + data).decode()


def unsealed(text: object) -> str | None:
    """Return the thinking, or None for a text that no server with this key wrote."""
    if not isinstance(text, str) or not text.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(text.removeprefix(_PREFIX))
    except ValueError:
        return None
    digest, data = packed[:32], packed[32:]
    return data.decode(errors="surrogatepass") if hmac.compare_digest(digest, _digest(data)) else None


def _digest(data: bytes) -> bytes:
    return hmac.digest(_key(), data, hashlib.sha256)


@cache
def _key() -> bytes:
    return f"thinking {read_door(os.environ).api_key or ''}".encode()

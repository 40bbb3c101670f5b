"""Thinking as an opaque text, for clients that keep the conversation: `encrypted_content` and `signature`.

A key authenticates it, so that all workers and replicas with the same key read it, also after a restart. It is not
secret: an answer has the thinking beside it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_PREFIX = "kimi-thinking-v1."


class Seal:
    """Writes and reads sealed thinking with one key."""

    def __init__(self, key: str) -> None:
        self._key = f"thinking {key}".encode()

    def seal(self, thinking: str) -> str:
        """Return a text that only a gateway with this key reads."""
        data = thinking.encode(errors="surrogatepass")
        return _PREFIX + base64.urlsafe_b64encode(self._digest(data) + data).decode()

    def open(self, text: object) -> str | None:
        """Return the thinking, or None for a text that no gateway with this key wrote."""
        if not isinstance(text, str) or not text.startswith(_PREFIX):
            return None
        try:
            packed = base64.urlsafe_b64decode(text.removeprefix(_PREFIX))
        except ValueError:
            return None
        digest, data = packed[:32], packed[32:]
        return data.decode(errors="surrogatepass") if hmac.compare_digest(digest, self._digest(data)) else None

    def _digest(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)

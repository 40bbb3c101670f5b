"""Keys of clients: one a line of a file, with an optional name before it, read again when the file changes."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..base.errors import KimiError
from ..base.http import is_loopback
from .errors import Refusal
from .key_file import read_keys

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Client(NamedTuple):
    """Who asks: the name of the key, and the key; both empty without keys."""

    name: str = ""
    key: str = ""


class Keys:
    """The keys that are in force, of a file or a single one. Without either, only this machine may ask."""

    def __init__(self, path: Path | None, key: str = "") -> None:
        self._path = path
        self._keys = read_keys(path) if path is not None else {"key": key} if key else {}
        self._read = self._stamp()
        self._looked_s = time.monotonic()

    @property
    def needed(self) -> bool:
        """True if clients need a key."""
        return bool(self._keys)

    @property
    def first(self) -> str:
        """The first key, which all replicas of a service share; empty without keys."""
        return next(iter(self._keys.values()), "")

    def admit(self, headers: Mapping[bytes, bytes]) -> Client:
        """Return who asks; raise Refusal without a valid key, and for a web page where no key is needed."""
        if not self._keys:
            refuse_web_pages(headers)
            return Client()
        self._look()
        sent = _sent(headers)
        found = [Client(name, key) for name, key in self._keys.items() if hmac.compare_digest(sent, key.encode())]
        if not found:
            what = "this is not a key of this server" if sent else "this server needs a key"
            raise Refusal(f"{what}; send it as `Authorization: Bearer KEY`", status=401)
        return found[0]

    def _look(self) -> None:
        """Read the file again within a second of a change; a broken one changes nothing."""
        if self._path is None or time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        if (stamp := self._stamp()) == self._read:
            return
        self._read = stamp
        try:
            self._keys = read_keys(self._path)
        except KimiError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("the key file was read again: %d keys", len(self._keys))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return found and (found.st_mtime_ns, found.st_size, found.st_ino)


def _sent(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key as OpenAI's or Anthropic's clients send it."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def refuse_web_pages(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a browser sends for a page of another site: this server has no key that the page would lack.

    By DNS rebinding a page reaches loopback under its own name, and then only the Host header tells.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if (host and not is_loopback(_hostname(f"//{host}"))) or (origin and origin.partition("//")[2] != host):
        raise Refusal(
            "without a key this server answers programs of its own machine, under a loopback address or localhost, and "
            "no web pages; start it with a key file",
            status=403,
        )


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""

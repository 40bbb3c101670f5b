"""Folder of collected token ids: the operator's consent with its limits, and the files of stored requests.

`kimi-w4a8 draft collect` writes the consent. An engine whose KIMI_COLLECT names the folder stores the prompts and
answers of finished requests in `requests/KEY/`, where KEY stands for the client's key. Text is never stored.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from .errors import KimiError
from .files import write_atomic, write_private
from .variable import COLLECT

logger = logging.getLogger(__name__)

VARIABLE, CONSENT, REQUESTS = COLLECT, "collect.json", "requests"
NO_KEY = "all"  # KEY of a server without a client key
_EVERY_S, _AGED_S, _WAITING = 0.5, 3600.0, 512
_BLOCK = 4096  # of a disk, which files take as wholes: small ones would fill it unseen


@dataclass(frozen=True)
class Consent:
    """Terms of collecting. share: of all requests. keys: `key_name` of clients whose requests are all stored.

    most_bytes and most_of_key, a share of it for one key, limit what one engine's files take of the disk. tokenizer:
    `tokenizer_name` of the first engine that stored anything.
    """

    share: float = 0.0
    keys: tuple[str, ...] = ()
    most_bytes: int = 10**9
    most_of_key: float = 0.5
    most_days: float = 30.0
    tokenizer: str = ""

    def write(self, folder: Path) -> None:
        write_atomic(folder / CONSENT, json.dumps(asdict(self), indent=2) + "\n")


def read_consent(folder: Path) -> Consent:
    """Return the operator's consent; raise KimiError if there is none, or if other users can read the folder."""
    remedy = f"kimi-w4a8 draft collect {folder} --share 0.1"
    try:
        content = json.loads((folder / CONSENT).read_text())
        consent = Consent(**{**content, "keys": tuple(content.get("keys", ()))})
        sum((consent.share, consent.most_bytes, consent.most_of_key, consent.most_days))  # fails if one is no number
        mode = folder.stat().st_mode & 0o777
    except (OSError, ValueError, TypeError) as error:
        what = f"collecting was not switched on: {type(error).__name__}"
        raise KimiError(what, str(folder / CONSENT), "the operator's consent", remedy) from error
    if mode & 0o077:
        raise KimiError("other users can open the collected requests", str(folder), "mode 0700", f"chmod 700 {folder}")
    return consent


def key_name(key: str) -> str:
    """Return the folder's name for a client's key, which does not reveal it."""
    return blake2b(key.encode(), digest_size=8, person=b"kimi-collect").hexdigest()


def tokenizer_name(ids: Sequence[int], vocabulary: int) -> str:
    """Return a name that differs between tokenizers: of the ids of `PROBE`, and the size of the vocabulary."""
    return blake2b(json.dumps([*ids, vocabulary]).encode(), digest_size=8).hexdigest()


PROBE = "<|im_user|>Grüße, 世界! 1234567890 def f(x): return {'a': [x**2, None]}\n\n\t€ naïve<|im_end|>"


class StoredRequest(NamedTuple):
    """Token ids of a finished request. at: its end in ms since 1970. structured: a grammar shaped the answer."""

    id: str
    at: int
    structured: bool
    prompt: Sequence[int]
    answer: Sequence[int]


def packed(requests: Sequence[StoredRequest]) -> bytes:
    """Return a file of requests: a line of JSON with all but their token ids, then these as 32-bit integers."""
    rows = [(one.id, one.at, one.structured, len(one.prompt), len(one.answer)) for one in requests]
    ids = (struct.pack(f"<{len(part)}i", *part) for one in requests for part in (one.prompt, one.answer))
    return b"".join((json.dumps(rows).encode(), b"\n", *ids))


class Collector:
    """Thread that stores the requests of one client key; an error ends nothing.

    To make a file costs 0.1 ms and more, so requests that end in the same half second share one. Requests that find too
    many waiting are dropped.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key, self.consent = folder, key, read_consent(folder)
        self._since = time.time() - time.monotonic()  # a wall clock that jumps must delete nothing
        self._waiting = deque[StoredRequest]()
        self._files: dict[str, deque[tuple[str, int]]] = {key: deque()}  # by key, oldest first: name and bytes on disk
        self._bytes = Counter[str]()  # by key
        threading.Thread(target=self._run, name="collect", daemon=True).start()

    def wants(self) -> bool:
        """Decide whether to store a new request."""
        return self.key in self.consent.keys or random.random() < self.consent.share

    def require_tokenizer(self, name: str) -> None:
        """Raise KimiError if the folder has ids of another tokenizer; note this one in a new folder."""
        consent = read_consent(self.folder)
        if not consent.tokenizer:
            replace(consent, tokenizer=name).write(self.folder)
        elif consent.tokenizer != name:
            remedy = "collect into another folder: the token ids would mean other text"
            raise KimiError("this folder has token ids of another tokenizer", str(self.folder), name, remedy)

    def put(self, request: str, prompt: Sequence[int], answer: Sequence[int], structured: bool = False) -> None:
        """Store a finished request soon; returns at once."""
        if len(self._waiting) < _WAITING:
            self._waiting.append(StoredRequest(request, int(self._now() * 1000), structured, prompt, answer))

    def _now(self) -> float:
        """Return the Unix time by the clock at the collector's start."""
        return self._since + time.monotonic()

    def _run(self) -> None:
        failed, next_look = False, 0.0
        while True:
            try:
                self.consent = read_consent(self.folder)
                if time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + _AGED_S
                found = [self._waiting.popleft() for _ in range(len(self._waiting))]
                self._store(found)
                failed = failed and not found
            except KimiError:  # no consent, or none that can be read
                self.consent = replace(self.consent, share=0.0, keys=())
                self._waiting.clear()
            except Exception as error:
                if not failed:  # a full disk is reported once, not for each file
                    logger.error("requests were not collected: %r", error)
                failed = True
            time.sleep(_EVERY_S)

    def _look(self) -> None:
        """Read which files there are, and remove those that are too old."""
        for path in (self.folder / REQUESTS).glob("*"):
            entries = [(entry.name, -(-entry.stat().st_size // _BLOCK) * _BLOCK) for entry in sorted(path.iterdir())]
            self._files[path.name], self._bytes[path.name] = deque(entries), sum(size for _, size in entries)
            self._make_room(path.name, 0)

    def _store(self, requests: Sequence[StoredRequest]) -> None:
        """Write a file of requests, or more than one where the oldest of a full key would be too much to remove."""
        data, half = packed(requests), len(requests) // 2
        if half and len(data) > self.consent.most_bytes * self.consent.most_of_key / 16:
            self._store(requests[:half])
            self._store(requests[half:])
        elif requests and self._make_room(self.key, size := -(-len(data) // _BLOCK) * _BLOCK):
            folder = self.folder / REQUESTS / self.key
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"{requests[-1].at:013d}-{secrets.token_hex(4)}"  # engines may share a folder
            write_private(folder / name, data)
            self._files[self.key].append((name, size))
            self._bytes[self.key] += size

    def _make_room(self, key: str, size: int) -> bool:
        """Remove a key's files that are too old, and its oldest ones for `size` more bytes; False if it has no room.

        No key's files are removed for another key.
        """
        consent, files = self.consent, self._files[key]
        oldest = f"{int((self._now() - consent.most_days * 86400) * 1000):013d}"
        if size > (limit := consent.most_bytes * consent.most_of_key):
            return False
        while files and (files[0][0] < oldest or self._bytes[key] + size > limit):
            name, nbytes = files.popleft()
            self._bytes[key] -= nbytes
            (self.folder / REQUESTS / key / name).unlink(missing_ok=True)
        return self._bytes.total() + size <= consent.most_bytes

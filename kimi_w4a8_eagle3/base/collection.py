"""Folder of collected token ids: the operator's consent with its limits, and one file for each stored request.

`kimi-w4a8 draft collect` writes the consent. An engine whose KIMI_COLLECT names the folder stores the prompts and
answers of finished requests in `requests/KEY/`, where KEY stands for the client's key. Text is never stored.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue

from .errors import KimiError
from .files import write_atomic

logger = logging.getLogger(__name__)

VARIABLE, CONSENT, REQUESTS = "KIMI_COLLECT", "collect.json", "requests"
NO_KEY = "all"  # KEY of a server without a client key
_REREAD_S, _AGED_S, _WAITING = 2.0, 3600.0, 512


@dataclass(frozen=True)
class Consent:
    """Terms of collecting. share: of all requests. keys: `key_name` of clients whose requests are all stored.

    most_bytes and most_of_key, a share of it for one key, limit the files of one engine. tokenizer: `tokenizer_name` of
    the first engine that stored anything.
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


def request_bytes(prompt: Sequence[int], answer: Sequence[int]) -> bytes:
    """Return a request as it is stored: 32-bit integers, the prompt's length and all ids."""
    return array("i", [len(prompt), *prompt, *answer]).tobytes()


def write_request(path: Path, data: bytes) -> None:
    """Write a request's file for its owner alone; a reader never sees a part of it, and a full disk keeps none."""
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Collector:
    """Thread that stores requests; a request that finds it busy is dropped, and an error ends nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._consent, self._read_at = read_consent(folder), time.monotonic()
        self._queue: Queue[tuple[str, str, Sequence[int], Sequence[int], bool]] = Queue(_WAITING)
        self._files: dict[str, deque[tuple[str, int]]] = {}  # by key, oldest first: name and bytes
        self._bytes = Counter[str]()  # by key
        threading.Thread(target=self._run, name="collect", daemon=True).start()

    @property
    def consent(self) -> Consent:
        """The consent as it is now; none while its file cannot be read."""
        if time.monotonic() - self._read_at > _REREAD_S:
            self._read_at = time.monotonic()
            try:
                self._consent = read_consent(self.folder)
            except KimiError:
                self._consent = replace(self._consent, share=0.0, keys=())
        return self._consent

    def wants(self, key: str) -> bool:
        """Decide whether to store a new request of this key."""
        consent = self.consent
        return key in consent.keys or random.random() < consent.share

    def require_tokenizer(self, name: str) -> None:
        """Raise KimiError if the folder has ids of another tokenizer; note this one in a new folder."""
        if not self._consent.tokenizer:
            self._consent = replace(self._consent, tokenizer=name)
            self._consent.write(self.folder)
        if self._consent.tokenizer != name:
            remedy = "collect into another folder: the token ids would mean other text"
            raise KimiError("this folder has token ids of another tokenizer", str(self.folder), name, remedy)

    def put(
        self, key: str, request: str, prompt: Sequence[int], answer: Sequence[int], structured: bool = False
    ) -> None:
        """Store a finished request soon; returns at once. structured: a grammar shaped the answer."""
        with suppress(Full):
            self._queue.put_nowait((key, request, prompt, answer, structured))

    def _run(self) -> None:
        failed, found, next_look = False, None, 0.0
        while True:
            try:
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _AGED_S
                    self._look()
                if found is not None:
                    self._store(*found)
                failed = False
            except Exception as error:
                if not failed:  # a full disk is reported once, not for each request
                    logger.error("a request was not collected: %r", error)
                failed = True
            try:
                found = self._queue.get(timeout=_AGED_S)
            except Empty:
                found = None

    def _look(self) -> None:
        """Read which files there are, and remove those that are too old."""
        for path in (self.folder / REQUESTS).glob("*"):
            entries = [(entry.name, entry.stat().st_size) for entry in sorted(path.iterdir())]
            self._files[path.name], self._bytes[path.name] = deque(entries), sum(size for _, size in entries)
            self._make_room(path.name, 0)

    def _store(self, key: str, request: str, prompt: Sequence[int], answer: Sequence[int], structured: bool) -> None:
        data = request_bytes(prompt, answer)
        folder = self.folder / REQUESTS / key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = self._files.setdefault(key, deque())
        if not self._make_room(key, len(data)):
            return
        plain = request if re.fullmatch(r"[\w.-]{1,100}", request) else key_name(request)
        name = f"{int(time.time() * 1000):013d}{structured * 'j'}-{plain}"
        write_request(folder / name, data)
        files.append((name, len(data)))
        self._bytes[key] += len(data)

    def _make_room(self, key: str, size: int) -> bool:
        """Remove a key's files that are too old, and its oldest ones for `size` more bytes; False if it has no room.

        No key's files are removed for another key.
        """
        consent, files = self._consent, self._files[key]
        oldest = f"{int((time.time() - consent.most_days * 86400) * 1000):013d}"
        limit = int(consent.most_bytes * consent.most_of_key)
        if size > limit:
            return False
        while files and (files[0][0] < oldest or self._bytes[key] + size > limit):
            name, nbytes = files.popleft()
            self._bytes[key] -= nbytes
            (self.folder / REQUESTS / key / name).unlink(missing_ok=True)
        return self._bytes.total() + size <= consent.most_bytes

"""Conversations of a folder of collected requests: read, imported, divided into training and held-out, and erased."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_w4a8_eagle3.base.collection import NO_KEY, REQUESTS, read_consent, request_bytes, write_request
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.files import lines

STATES, SUFFIX = "states", ".safetensors"
STRUCTURED = "-structured"  # added to the kind of requests whose answers a grammar shaped
HELD_OUT = 0.1  # of each kind, the newest; before it as many choose the draft
_KEY = re.compile(rf"({NO_KEY}|[0-9a-f]{{16}})({STRUCTURED})?")  # folders of clients' keys, which no import may have
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: Ids
    answer: Ids


@dataclass(frozen=True)
class Collected:
    """Token ids of a conversation. replies: ranges [begin, end) that the target wrote. at: time of its end in ms.

    kind: the folder of its requests, which is a client's key, or a name given at the import; answers that a grammar
    shaped are a kind of their own.
    """

    kind: str
    tokens: tuple[int, ...]
    replies: tuple[tuple[int, int], ...]
    at: int

    @property
    def name(self) -> str:
        """Name of its states, from the tokens alone."""
        return blake2b(np.asarray(self.tokens, "<i4").tobytes(), digest_size=12).hexdigest()

    @property
    def key(self) -> str:
        """Name of the client's key, or of the import."""
        return found[1] if (found := _KEY.fullmatch(self.kind)) else self.kind

    def guessed(self) -> list[bool]:
        """Mark the tokens that a draft guesses: a reply's first token comes with its prompt."""
        marks = [False] * len(self.tokens)
        for begin, end in self.replies:
            marks[begin + 1 : end] = [True] * (end - begin - 1)
        return marks


def read_collected(folder: Path, longest: int, kinds: Sequence[str] = ()) -> list[Collected]:
    """Return the conversations, oldest first; a turn's request that a later turn repeats is part of that turn.

    longest: most tokens; longer conversations are left out. Raises KimiError without consent, for an empty folder, and
    for a file that is cut.
    """
    read_consent(folder)
    found = []
    for path in sorted((folder / REQUESTS).glob("*")):
        read = [one for file in path.iterdir() if (one := _read(file)) and len(one.tokens) <= longest]
        for kind in sorted({one.kind for one in read} & set(kinds) if kinds else {one.kind for one in read}):
            found += _joined([one for one in read if one.kind == kind])
    if not found:
        what = f"there are no requests of {', '.join(kinds)}" if kinds else "nothing was collected yet"
        raise KimiError(
            f"{what}, of up to {longest} tokens",
            str(folder / REQUESTS),
            "answers of an engine that was started with KIMI_COLLECT",
            f"kimi-w4a8 serve RECIPE --set env.KIMI_COLLECT={folder}",
        )
    return sorted(found, key=lambda one: (one.at, one.tokens))


def divided(conversations: Sequence[Collected]) -> tuple[list[Collected], list[Collected], list[Collected]]:
    """Return the conversations to train on, those that choose the draft, and those that compare it with the old one.

    The last two are the newest fifth of each kind, each at least one conversation.
    """
    train, choosing, held_out = list[Collected](), list[Collected](), list[Collected]()
    for kind in sorted({one.kind for one in conversations}):
        left = [one for one in conversations if one.kind == kind]
        share = max(1, round(len(left) * HELD_OUT))
        for taken in (held_out, choosing):
            since = left[-min(share, len(left))].at if left else 0  # those of one millisecond stay together
            taken += [one for one in left if one.at >= since]
            left = [one for one in left if one.at < since]
        train += left
    return sorted(train, key=lambda one: one.at), choosing, held_out


def limited(conversations: Sequence[Collected], share: float) -> list[Collected]:
    """Leave out a client's oldest conversations where its key would have more than `share` of all tokens.

    Imports are the operator's, and requests without keys count as everybody's: neither is limited.
    """
    tokens = Counter[str]()
    for one in conversations:
        tokens[one.key] += len(one.tokens)
    own = {key: count for key, count in tokens.items() if key != NO_KEY and _KEY.fullmatch(key)}
    rest, most = tokens.total() - sum(own.values()), max(own.values(), default=0)
    least = 0 if rest else min(own.values(), default=0)  # without others, equal parts are the best there is
    while most > (cap := max(least, int(share * (rest + sum(min(count, most) for count in own.values()))))):
        most = cap
    left = {key: most if key in own else count for key, count in tokens.items()}
    kept = []
    for one in reversed(conversations):
        left[one.key] -= len(one.tokens)
        kept += [one] if left[one.key] >= 0 else []
    return kept[::-1]


def import_ids(source: Path, folder: Path, kind: str) -> int:
    """Store a `.jsonl` file of {"prompt": [ids], "answer": [ids]} as requests of `kind`; return their number.

    Raises KimiError for a wrong line before anything is stored.
    """
    read_consent(folder)
    if not re.fullmatch(r"\w[\w-]{0,40}", kind) or _KEY.fullmatch(kind):
        raise UsageError(f"{kind!r} is no name of a kind", "--as", "letters, digits, - and _; no client's name")
    rows = []
    for number, line in enumerate(lines(source), 1):
        try:
            rows += [_Line.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
            raise KimiError(what, f"{source}, line {number}", '{"prompt": [ids], "answer": [ids]}') from None
    place, now = folder / REQUESTS / kind, int(time.time() * 1000)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        name = f"{now - len(rows) + number:013d}-import{number}"
        write_request(place / name, request_bytes(row.prompt, row.answer))
    return len(rows)


def erase(folder: Path, wanted: Callable[[str, str], bool]) -> int:
    """Remove the requests for which `wanted(key, request id)` is true, and all states without a request; count them."""
    read_consent(folder)
    removed = 0
    for file in list((folder / REQUESTS).glob("*/*")):
        if wanted(file.parent.name, file.name.partition("-")[2]):
            file.unlink(missing_ok=True)
            removed += 1
    try:
        kept = {one.name for one in read_collected(folder, 2**31)}
    except KimiError:
        kept = set()
    for file in (folder / STATES).glob(f"*{SUFFIX}"):
        if file.stem not in kept:
            file.unlink(missing_ok=True)
    return removed


def summarized(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each kind with its requests and bytes."""
    for path in sorted((folder / REQUESTS).glob("*")):
        sizes = [file.stat().st_size for file in path.iterdir()]
        yield path.name, len(sizes), sum(sizes)


def _read(file: Path) -> Collected | None:
    """Return one request; None for a file that the engine is writing or has just removed."""
    if file.name.startswith("."):
        return None
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    ids = np.frombuffer(data, "<i4").tolist() if len(data) % 4 == 0 else []
    if len(ids) < 2 or not 1 <= ids[0] < len(ids) or min(ids) < 0:
        what = "this file of a collected request is cut"
        raise KimiError(what, str(file), "its length, and token ids", f"remove it: rm {json.dumps(str(file))}")
    when = file.name.partition("-")[0]
    kind = file.parent.name + STRUCTURED * when.endswith("j")
    return Collected(kind, tuple(ids[1:]), ((ids[0], len(ids) - 1),), int(when.rstrip("j")))


def _joined(requests: list[Collected]) -> list[Collected]:
    """Join requests of which one begins with all tokens of another; in sorted order they are neighbours."""
    found: list[Collected] = []
    for one in sorted(requests, key=lambda one: (one.tokens, one.at)):
        while found and one.tokens[: len(found[-1].tokens)] == found[-1].tokens:
            before = found.pop()
            replies = tuple(sorted({*before.replies, *one.replies}))
            one = Collected(one.kind, one.tokens, replies, max(one.at, before.at))
        found.append(one)
    return found

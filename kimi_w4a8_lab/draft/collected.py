"""Conversations of a folder of collected requests: read, imported, divided into training and held-out, and erased."""

from __future__ import annotations

import json
import re
import shutil
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_w4a8_eagle3.base.collection import NO_KEY, REQUESTS, StoredRequest, packed, read_consent
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.files import write_private

from ..base.data_file import lines
from ..base.first_error import first_error

_IN_A_FILE = 512  # requests
STATES, SUFFIX = "states", ".safetensors"
JOB = "capture-"  # folder in STATES of a running capture, which has token ids of requests
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
        return blake2b(array("i", self.tokens).tobytes(), digest_size=12).hexdigest()

    @property
    def key(self) -> str:
        """Name of the client's key, or of the import."""
        return found[1] if (found := _KEY.fullmatch(self.kind)) else self.kind

    @property
    def guessed(self) -> list[bool]:
        """Mark of each token: True if a draft guesses it. A reply's first token comes with its prompt."""
        marks = [False] * len(self.tokens)
        for begin, end in self.replies:
            marks[begin + 1 : end] = [True] * (end - begin - 1)
        return marks


def by_kind(conversations: Sequence[Collected]) -> dict[str, list[Collected]]:
    """Return the conversations of each kind, in their order."""
    kinds = sorted({one.kind for one in conversations})
    return {kind: [one for one in conversations if one.kind == kind] for kind in kinds}


def read_collected(folder: Path, longest: int, kinds: Sequence[str] = ()) -> list[Collected]:
    """Return the conversations, oldest first; a turn's request that a later turn repeats is part of that turn.

    longest: most tokens; longer conversations are left out. Raises KimiError without consent, for an empty folder, and
    for a file that is cut.
    """
    read_consent(folder)
    found = []
    for path in sorted((folder / REQUESTS).glob("*")):
        read = [_alone(path.name, one) for file in path.iterdir() for one in read_requests(file)]
        for kind, some in by_kind([one for one in read if len(one.tokens) <= longest]).items():
            found += _joined(some) if kind in (kinds or (kind,)) else []
    if not found:
        what = f"there are no requests of {', '.join(kinds)}" if kinds else "nothing was collected yet"
        remedy = f"kimi-w4a8 serve RECIPE --set env.KIMI_COLLECT={folder}"
        raise KimiError(f"{what}, of up to {longest} tokens", str(folder / REQUESTS), "answers of an engine", remedy)
    return sorted(found, key=lambda one: (one.at, one.tokens))


def divided(conversations: Sequence[Collected]) -> tuple[list[Collected], list[Collected], list[Collected]]:
    """Return the conversations to train on, those that choose the draft, and those that compare it with the old one.

    The last two are the newest fifth of each kind, each at least one conversation.
    """
    train, choosing, held_out = list[Collected](), list[Collected](), list[Collected]()
    for left in by_kind(conversations).values():
        share = max(1, round(len(left) * HELD_OUT))
        for taken in (held_out, choosing):
            since = left[-min(share, len(left))].at if left else 0  # those of one millisecond stay together
            taken += [one for one in left if one.at >= since]
            left = [one for one in left if one.at < since]
        train += left
    return sorted(train, key=lambda one: one.at), choosing, held_out


def limited(conversations: Sequence[Collected], share: float, most: int) -> list[Collected]:
    """Return the newest conversations, at most `most`, of which no client's key has more than `share` of all tokens.

    Imports are the operator's, and requests without keys count as everybody's: neither is limited.
    """
    left = OrderedDict(enumerate(sorted(conversations, key=lambda one: one.at)))
    places, tokens = defaultdict[str, deque[int]](deque), Counter[str]()
    for place, one in left.items():
        places[one.key].append(place)
        tokens[one.key] += len(one.tokens)
    total, clients = tokens.total(), [key for key in places if key != NO_KEY and _KEY.fullmatch(key)]
    # Without others, equal parts are the best there is.
    least = min(map(tokens.__getitem__, clients), default=0) if len(clients) == len(places) else 0
    largest = [(-tokens[key], key) for key in clients] if len(places) > 1 else []
    heapify(largest)
    while True:
        while largest and -largest[0][0] > tokens[key := largest[0][1]]:  # it has lost some since
            heapreplace(largest, (-tokens[key], key))
        if largest and -largest[0][0] > max(least, share * total):
            key = largest[0][1]
        elif len(left) > most:
            key = next(iter(left.values())).key  # of the oldest
        else:
            return list(left.values())
        dropped = len(left.pop(places[key].popleft()).tokens)
        tokens[key], total = tokens[key] - dropped, total - dropped


def read_ids(source: Path, kind: str) -> list[_Line]:
    """Return the requests of a `.jsonl` file for an import as `kind`; raise KimiError for a wrong line or name."""
    if not re.fullmatch(r"\w[\w-]{0,40}", kind) or _KEY.fullmatch(kind):
        raise UsageError(f"{kind!r} is no name of a kind", "--as", "letters, digits, - and _; no client's name")
    rows, expected = list[_Line](), '{"prompt": [ids], "answer": [ids]}'
    for number, line in enumerate(lines(source, "the requests", expected), 1):
        try:
            rows += [_Line.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            raise KimiError(first_error(error), f"{source}, line {number}", expected) from None
    if not rows:
        raise KimiError("the file has no request", str(source), f"lines of {expected}")
    return rows


def store_ids(rows: Sequence[_Line], folder: Path, kind: str) -> int:
    """Store requests that `read_ids` returned; return their number."""
    read_consent(folder)
    place, start = folder / REQUESTS / kind, int(time.time() * 1000) - len(rows)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = [StoredRequest(f"import{at}", start + at, False, row.prompt, row.answer) for at, row in enumerate(rows)]
    for at in range(0, len(found), _IN_A_FILE):
        write_private(place / f"{found[at].at:013d}-import{start}", packed(found[at : at + _IN_A_FILE]))
    return len(rows)


def erase(folder: Path, kinds: Collection[str], ids: Collection[str]) -> int:
    """Remove requests of these kinds, keys and ids, and all states without a request; return the number of requests.

    What a killed capture left goes, too.
    """
    read_consent(folder)
    removed = 0
    for file in list((folder / REQUESTS).glob("*/*")):
        found, key = read_requests(file), file.parent.name
        left = [one for one in found if not (one.id in ids or key in kinds or _alone(key, one).kind in kinds)]
        removed += len(found) - len(left)
        if found and not left:
            file.unlink(missing_ok=True)
        elif len(left) < len(found):
            write_private(file, packed(left))
    try:
        kept = {one.name for one in read_collected(folder, 2**31)}
    except KimiError:
        kept = set()
    for file in (folder / STATES).glob(f"*{SUFFIX}"):
        if file.stem not in kept:
            file.unlink(missing_ok=True)
    remove_killed(folder / STATES)
    return removed


def remove_killed(states: Path) -> None:
    """Remove what killed captures left, which has token ids of requests."""
    for left in states.glob(f"{JOB}*"):
        shutil.rmtree(left)


def summarized(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each key and import with its requests and bytes."""
    for path in sorted((folder / REQUESTS).glob("*")):
        files = list(path.iterdir())
        yield path.name, sum(len(read_requests(file)) for file in files), sum(file.stat().st_size for file in files)


def _alone(key: str, request: StoredRequest) -> Collected:
    tokens = (*request.prompt, *request.answer)
    kind = key + STRUCTURED * request.structured
    return Collected(kind, tokens, ((len(request.prompt), len(tokens)),), request.at)


def read_requests(file: Path) -> list[StoredRequest]:
    """Return the requests of a file; none of one that the engine is writing or has just removed."""
    if file.name.startswith("."):
        return []
    found = list[StoredRequest]()
    try:
        head, _, body = file.read_bytes().partition(b"\n")
        ids, end = array("i", body), 0
        for name, at, structured, prompt, answer in json.loads(head):
            begin, end = end, end + prompt + answer
            found.append(StoredRequest(name, at, structured, ids[begin : begin + prompt], ids[begin + prompt : end]))
        if end != len(ids):
            raise ValueError(end)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        what, remedy = "this file of collected requests is cut, or of an earlier version", f"rm {json.dumps(str(file))}"
        raise KimiError(what, str(file), "as many token ids as it names", f"remove it: {remedy}") from error
    return found


def _joined(requests: Sequence[Collected]) -> list[Collected]:
    """Join requests of which one begins with all tokens of another; in sorted order they are neighbours."""
    found: list[Collected] = []
    for one in sorted(requests, key=lambda one: (one.tokens, one.at)):
        while found and one.tokens[: len(found[-1].tokens)] == found[-1].tokens:
            before = found.pop()
            replies = tuple(sorted({*before.replies, *one.replies}))
            one = Collected(one.kind, one.tokens, replies, max(one.at, before.at))
        found.append(one)
    return found

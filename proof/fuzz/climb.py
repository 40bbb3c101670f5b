"""Search for what costs the engine most: hypothesis climbs from what cost more than all that it tried before.

    python -m proof.fuzz.climb [--minutes 30] [--seed 1] [--open]

It tries pictures, and patterns and schemas with 163,840 tokens. Each try runs in a process of its own: the door's check
first, and then what the engine does with what the door admitted. A fault is an admitted picture that takes its thread
more than 250 ms, or a grammar with a longer mask than KIMI_MAX_MASK_MS. With --open the door's checks are left out and
JSON has free white space: each of the three kinds must be found then. Otherwise the exit code is 1.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import resource
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import typer
import xgrammar
from hypothesis import Phase, target
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from PIL import Image

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.pictures import check_pictures
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.trial import costliest_mask
from proof.fuzz.grammars import PATTERNS, SCHEMAS
from proof.fuzz.rounds import Stopped, try_round
from proof.vocabulary import SIZE, vocabulary

CONTEXT = 262_144  # Kimi's
_PICTURES_S = 0.25  # they are opened in a thread, and the door allows 0.2 s
_TRY_S = 20.0
_MEMORY_BYTES = 2**32
_PART = 2**22  # bytes of all parts of one kind
_ROUND = 24  # tries of a kind: half of them are drawn, and half climb
_STEPS = 48  # tokens of a random answer


class Cost(NamedTuple):
    """seconds: of the event loop, or of the longest mask. resident: bytes at the peak. sent: bytes of the request."""

    seconds: float
    resident: int
    sent: int
    refused: bool = False


@dataclass(frozen=True)
class CostKind:
    """A kind of request. check: the door. work: the engine, which may name the seconds itself."""

    name: str
    most_s: float
    requests: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    work: Callable[[Any], float | None]
    largest: int


class OrderedTries(InMemoryExampleDatabase):
    """Kept tries in an order that does not depend on the hashes of bytes, which differ in each process."""

    def fetch(self, key: bytes) -> Iterator[bytes]:
        """Yield the tries under a key."""
        yield from sorted(super().fetch(key))


class Climb:
    """The costliest try of a kind. The next round begins with the costliest ones of the rounds before it."""

    def __init__(self, kind: CostKind, seed: int = 1) -> None:
        self.kind, self.tries, self._seed, self._rounds = kind, 0, seed, 0
        self.best, self.example = Cost(0.0, 0, 1), None
        self._database = OrderedTries()

    @property
    def over(self) -> bool:
        """True if an admitted request took too long."""
        return self.best.seconds > self.kind.most_s

    def round(self, opened: bool, until: float = float("inf"), most: int = _ROUND) -> None:
        """Try some requests more: towards CPU time, CPU time for a byte sent, and memory for a byte sent."""

        def attempt(request: Any) -> None:
            if time.monotonic() > until or (opened and self.over):
                raise Stopped
            self.tries += 1
            cost = tried(self.kind, request, opened)
            if cost.refused:
                return
            if cost.seconds > self.best.seconds:
                self.best, self.example = cost, request
            target(cost.seconds, label="seconds")
            target(cost.seconds / cost.sent, label="seconds for a byte")
            target(cost.resident / cost.sent, label="memory for a byte")

        self._rounds += 1
        phases = (Phase.reuse, Phase.generate, Phase.target)
        try_round(self.kind.requests, attempt, f"{self._seed}:{self._rounds}", most, phases, self._database)


def tried(kind: CostKind, request: Any, opened: bool) -> Cost:
    """Return what the engine spends on the request, measured in a fork of this process."""
    sent = len(request if isinstance(request, str) else json.dumps(request))
    if sent > kind.largest:
        return Cost(0.0, 0, sent, refused=True)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            signal.setitimer(signal.ITIMER_PROF, _TRY_S)
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _MEMORY_BYTES,) * 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            refused = not opened and _refused(kind, request)
            os.write(writer, b"checked\n")
            signal.setitimer(signal.ITIMER_PROF, _TRY_S)
            os.write(writer, json.dumps((0.0, 0, True) if refused else _measured(kind, request)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    if not said:  # the door's check took too long, and its worker would have been killed, too
        return Cost(0.0, 0, sent, refused=True)
    found = said.partition("\n")[2]
    seconds, resident, refused = json.loads(found) if found else (_TRY_S, _MEMORY_BYTES, False)
    return Cost(seconds, resident, sent, refused)


def _refused(kind: CostKind, request: Any) -> bool:
    try:
        kind.check(request)
    except (Refusal, ValueError, RuntimeError, MemoryError):
        return True
    return False


def _measured(kind: CostKind, request: Any) -> tuple[float, int, bool]:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the work may fill free memory that this process already holds
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before, seconds = _status("VmHWM"), list[float]()
        while len(seconds) < 2:  # another process disturbs one of them, seldom both
            start = time.process_time()
            if (named := kind.work(request)) is not None:
                seconds = [named]
                break
            seconds.append(time.process_time() - start)
    except (ValueError, RuntimeError):
        return 0.0, 0, True
    except MemoryError:
        return _TRY_S, _MEMORY_BYTES, False
    return min(seconds), max(0, _status("VmHWM") - before), False


def _status(name: str) -> int:
    """Return a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _saved(form: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, form)
    return out.getvalue()


def _drawn(form: str, parts: list[tuple[int, int, int]], pictures: int) -> list[str]:
    """Return pictures as data addresses. parts: kind, bytes in it, number of them."""
    whole, place = _saved(form), 33 if form == "PNG" else 2
    made = b"".join(_part(form, kind, size) * min(number, _PART // max(size, 16)) for kind, size, number in parts)
    data = base64.b64encode(whole[:place] + made + whole[place:]).decode()
    return [f"data:image/{form.lower()};base64,{data}"] * pictures


def _part(form: str, kind: int, size: int) -> bytes:
    if form == "JPEG":
        head = (b"\xff\xe1", b"\xff\xe0", b"\xff\xfe")[kind % 3]
        data = (b"Exif\0\0" if kind % 3 == 0 else b"") + bytes(min(size, 60_000))
        return head + struct.pack(">H", len(data) + 2) + data
    name, data = ((b"tEXt", b"a\0" + b"b" * size), (b"zTXt", b"a\0\0" + zlib.compress(bytes(size))))[kind % 2]
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _open(sources: list[str]) -> None:
    for source in sources:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).load()


class Grammars:
    """Compiles with a vocabulary as large as Kimi's. opened: with free white space, which the plugin takes away."""

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        info = xgrammar.TokenizerInfo([*vocabulary(), b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[SIZE])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._limit_ms = DoorSettings().max_mask_ms

    def compiled(self, text: str) -> Any:
        """Return the grammar as SGLang compiles it."""
        if text.startswith("{"):
            return self._compiler.compile_json_schema(text, any_whitespace=self._opened)
        return self._compiler.compile_regex(text)

    def check(self, text: str) -> None:
        """Do what a worker of the door does."""
        ms, _ = costliest_mask(self.compiled(text), self._limit_ms)
        if ms > self._limit_ms:
            raise Refusal("too slow")

    def answer(self, text: str) -> float:
        """Return the seconds of the longest mask along a random answer: not the path that the door takes."""
        random = Random(text)
        matcher = xgrammar.GrammarMatcher(self.compiled(text))
        bitmask = xgrammar.allocate_token_bitmask(1, SIZE + 1)
        longest = 0.0
        for _ in range(_STEPS):
            seconds = []
            for _ in range(2):  # another process disturbs one of them, seldom both
                start = time.thread_time()
                matcher.fill_next_token_bitmask(bitmask)
                seconds.append(time.thread_time() - start)
            longest = max(longest, min(seconds))
            words = bitmask[0].tolist()
            for _ in range(10_000):  # a token that the mask allows, bytes more often than others
                token = random.randrange(random.choice((256, SIZE)))
                if words[token // 32] >> token % 32 & 1:
                    break
            else:
                break
            if not matcher.accept_token(token) or matcher.is_terminated():
                break
        return longest


def kinds(grammars: bool = True, opened: bool = False) -> list[CostKind]:
    """Return the three kinds. Their requests grow by exponents, from harmless ones."""
    doubled = st.integers(0, 6).map(lambda exponent: 2**exponent)
    number = st.integers(0, 18).map(lambda exponent: 2**exponent)
    parts = st.lists(st.tuples(st.integers(0, 5), number, number), min_size=1, max_size=3)
    pictures = st.builds(_drawn, st.sampled_from(("JPEG", "PNG")), parts, doubled)
    found = [CostKind("pictures", _PICTURES_S, pictures, check_pictures, _open, 2**24)]
    if grammars:
        use, most_s = Grammars(opened), DoorSettings().max_mask_ms / 1000
        found += [
            CostKind("patterns", most_s, PATTERNS, use.check, use.answer, 2**16),
            CostKind("schemas", most_s, SCHEMAS.map(json.dumps), use.check, use.answer, 2**16),
        ]
    return found


def main(
    minutes: float = typer.Option(30.0, min=0.01, help="How long to climb, shared by the three kinds."),
    seed: int = typer.Option(1, help="The same seed draws the same first tries."),
    opened: bool = typer.Option(False, "--open", help="Leave out the door's checks: then each kind must be found."),
) -> None:
    """Climb, print the costliest request of each kind, and exit with 1 when it is a fault; with --open when none is."""
    climbs, end = [Climb(kind, seed) for kind in kinds(opened=opened)], time.monotonic() + minutes * 60
    while time.monotonic() < end and not (opened and all(climb.over for climb in climbs)):
        for climb in climbs:
            climb.round(opened, end)
    print("| kind | tries | costliest | allowed | sent | resident |\n|---|---|---|---|---|---|")
    for climb in climbs:
        cost = climb.best
        row = f"| {climb.kind.name} | {climb.tries} | {cost.seconds * 1000:.0f} ms | {climb.kind.most_s * 1000:.0f} ms "
        print(row + f"| {cost.sent:,} | {cost.resident / 2**20:.0f} MiB |\n  {str(climb.example)[:300]}")
    over = [climb for climb in climbs if climb.over]
    raise typer.Exit(len(over) < len(climbs) if opened else bool(over))


if __name__ == "__main__":
    run(lambda: typer.run(main))

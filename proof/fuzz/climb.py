"""Search for what costs the engine most: keep what cost more than what was found before, and change that.

    python -m proof.fuzz.climb [--minutes 30] [--seed 1] [--open]

It tries reasoning that inflates, pictures, and patterns and schemas with 163,840 tokens. Each try runs in a process of
its own: the door's check first, and then what the engine does with what the door admitted. A fault is an admitted
request that takes the event loop more than 100 ms (pictures: their thread 250 ms), or a grammar with a longer mask than
KIMI_MAX_MASK_MS. With --open the door's checks are left out and JSON has free white space: each of the four kinds must
be found then. Otherwise the exit code is 1.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import random
import re
import resource
import signal
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import typer
import xgrammar
from PIL import Image

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.door.answers import Refusal
from kimi_w4a8_eagle3.door.pictures import check_pictures
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.shape import inflated
from kimi_w4a8_eagle3.door.trial import costliest_mask
from proof.vocabulary import SIZE, vocabulary

CONTEXT = 262_144  # Kimi's
LOOP_S = 0.1
_PICTURES_S = 0.25  # they are opened in a thread, and the door allows 0.2 s
_TRY_S = 20.0
_MEMORY_BYTES = 2**32
_KEPT = 12
_STEPS = 48  # tokens of a random answer


class Cost(NamedTuple):
    """seconds: of the event loop, or of the longest mask. resident: bytes at the peak. sent: bytes of the request."""

    seconds: float
    resident: int
    sent: int
    refused: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of request. start: the first ones; change: a changed one; check: the door; work: the engine."""

    name: str
    most_s: float
    start: list[Any]
    change: Callable[[Any, Random], Any]
    encode: Callable[[Any], Any]
    check: Callable[[Any], object]
    work: Callable[[Any, Random], float | None]
    largest: int


@dataclass
class Climb:
    """The costliest tries of a kind by CPU time, by CPU time for a byte sent, and by memory for a byte sent."""

    kind: Kind
    tries: int = 0
    best: Cost = field(default_factory=lambda: Cost(0.0, 0, 1))
    example: Any = None
    ladders: list[list[tuple[float, int, Any]]] = field(default_factory=lambda: [[], [], []])

    def step(self, random: Random, opened: bool) -> None:
        """Try one request more."""
        ladder = random.choice(self.ladders)
        start = self.kind.start
        value = start[self.tries % len(start)]
        if self.tries >= len(start):
            rung = min(random.randrange(len(ladder)), random.randrange(len(ladder))) if ladder else 0
            value = ladder[rung][2] if ladder else value
            for _ in range(random.choice((1, 1, 2, 4))):  # a small change may cost less than a measurement shows
                value = self.kind.change(value, random)
        self.tries += 1
        cost = tried(self.kind, value, random.randrange(2**32), opened)
        if cost.refused:
            return
        if cost.seconds > self.best.seconds:
            self.best, self.example = cost, value
        for held, height in zip(
            self.ladders, (cost.seconds, cost.seconds / cost.sent, cost.resident / cost.sent), strict=True
        ):
            if all(value != other for _, _, other in held):
                held.append((height, self.tries, value))
            held.sort(reverse=True, key=lambda rung: rung[:2])
            del held[_KEPT:]


def tried(kind: Kind, value: Any, seed: int, opened: bool) -> Cost:
    """Return what the engine spends on the request, measured in a fork of this process."""
    encoded = kind.encode(value)
    sent = len(encoded if isinstance(encoded, str) else json.dumps(encoded))
    if sent > kind.largest:
        return Cost(0.0, 0, sent, refused=True)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            signal.setitimer(signal.ITIMER_PROF, _TRY_S)
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _MEMORY_BYTES,) * 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, json.dumps(_measured(kind, encoded, seed, opened)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    seconds, resident, refused = json.loads(said) if said else (_TRY_S, _MEMORY_BYTES, False)
    return Cost(seconds, resident, sent, refused)


def _measured(kind: Kind, encoded: Any, seed: int, opened: bool) -> tuple[float, int, bool]:
    try:
        if not opened:
            kind.check(encoded)
        ctypes.CDLL(None).malloc_trim(0)  # else the work may fill free memory that this process already holds
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before, start = _status("VmHWM"), time.process_time()
        seconds = kind.work(encoded, Random(seed))
    except (Refusal, ValueError, RuntimeError):
        return 0.0, 0, True
    except MemoryError:
        return _TRY_S, _MEMORY_BYTES, False
    return (time.process_time() - start if seconds is None else seconds), max(0, _status("VmHWM") - before), False


def _status(name: str) -> int:
    """Return a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# Reasoning: (pattern, times, items)
def _packed(value: tuple[str, int, int]) -> list[dict[str, str]]:
    text, times, items = value
    blob = base64.urlsafe_b64encode(zlib.compress(text.encode() * times)).decode()
    return [{"type": "reasoning", "encrypted_content": f"sglang-reasoning-v1.{blob}"}] * items


def _change_reasoning(value: tuple[str, int, int], random: Random) -> tuple[str, int, int]:
    text, times, items = value
    choice = random.randrange(4)
    if choice == 0:
        return text + random.choice(("a", " ", "\n", "ß", "word ")), times, items
    if choice == 1:
        return text[: max(1, len(text) // 2)], times, items
    if choice == 2:
        return text, min(2**24, times * random.choice((2, 8, 64))), items
    return text, times, min(64, items * 2)


def _check_reasoning(items: list[dict[str, str]]) -> None:
    limit = 16 * CONTEXT
    if inflated(items, limit) > limit:
        raise Refusal("longer than the context")


def _inflate(items: list[dict[str, str]], _: Random) -> None:
    """Do what SGLang's decode_reasoning_state does, which keeps the texts of all items."""
    texts = [zlib.decompress(base64.urlsafe_b64decode(item["encrypted_content"].partition(".")[2])) for item in items]
    assert sum(len(text.decode()) for text in texts) >= 0


# Pictures: (form, [(kind of part, bytes in it, number of them)], pictures)
def _saved(form: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, form)
    return out.getvalue()


def _drawn(value: tuple[str, list[tuple[int, int, int]], int]) -> list[str]:
    form, parts, pictures = value
    whole, place = _saved(form), 33 if form == "PNG" else 2
    made = b"".join(_part(form, kind, size) * number for kind, size, number in parts)
    data = base64.b64encode(whole[:place] + made + whole[place:]).decode()
    return [f"data:image/{form.lower()};base64,{data}"] * pictures


def _part(form: str, kind: int, size: int) -> bytes:
    if form == "JPEG":
        head = (b"\xff\xe1", b"\xff\xe0", b"\xff\xfe")[kind % 3]
        data = (b"Exif\0\0" if kind % 3 == 0 else b"") + bytes(min(size, 60_000))
        return head + struct.pack(">H", len(data) + 2) + data
    name, data = ((b"tEXt", b"a\0" + b"b" * size), (b"zTXt", b"a\0\0" + zlib.compress(bytes(size))))[kind % 2]
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _change_picture(value: Any, random: Random) -> Any:
    form, parts, pictures = value
    if random.random() < 0.15:
        return form, parts, min(64, pictures * 2)
    parts = list(parts) or [(0, 4, 1)]
    place = random.randrange(len(parts))
    kind, size, number = parts[place]
    choice = random.randrange(5)
    if choice == 0:
        parts.append((random.randrange(6), random.choice((0, 4, 1000)), 1))
    elif choice == 1:
        parts[place] = kind, min(2**20 - 1, max(1, size) * 4), number
    elif choice == 2:
        parts[place] = kind, size // 4, number
    else:
        parts[place] = kind, size, min(10**6, number * random.choice((2, 8, 64)))
    return form, parts, pictures


def _open(sources: list[str], _: Random) -> None:
    for source in sources:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).load()


# Grammars: a pattern or a schema as text
_CONSTANT = re.compile(r'"const": \d+')


def _change_pattern(text: str, random: Random) -> str:
    begin, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    part = text[begin:end] or "a"
    new = random.choice(
        (
            *(f"({part})*", f"({part}){{1,{random.choice((3, 10, 60))}}}", f"({part}|{random.choice('a.b')})"),
            *(part * 2, f"({part})+", random.choice((".", ".*", "[a-z]", "[^a]", "a"))),
            f"{part}{{{random.choice((3, 20, 60))}}}",
        )
    )
    return text[:begin] + new + text[end:]


def _change_schema(text: str, random: Random) -> str:
    """Repeat alternatives with other constants, put a part into an array, or offer a constant beside it."""
    schema = json.loads(text)
    parts: list[tuple[Any, Any]] = []
    choices: list[Any] = []

    def walk(node: Any) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(inner, dict | list):
                (choices if isinstance(inner, list) else parts).append((node, key))
                walk(inner)

    walk(schema)
    # A large schema has many parts and few lists of alternatives, so a list is chosen as often as a part.
    if choices and random.random() < 0.5:
        node, key = random.choice(choices)
        alternatives = node[key] * random.choice((2, 4))
        node[key] = [
            json.loads(_CONSTANT.sub(lambda _: f'"const": {random.randrange(10**6)}', json.dumps(one)))
            for one in alternatives
        ]
    elif parts:
        node, key = random.choice(parts)
        inner = node[key]
        other = {"type": "array", "items": {"const": random.randrange(10**6)}}
        node[key] = random.choice(({"type": "array", "items": inner}, {"anyOf": [inner, other]}))
    return json.dumps(schema)


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

    def answer(self, text: str, random: Random) -> float:
        """Return the seconds of the longest mask along a random answer: not the path that the door takes."""
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


def kinds(grammars: bool = True, opened: bool = False) -> list[Kind]:
    """Return the four kinds, which start from what nobody would suspect."""
    reasoning = [("add ", 9, 1)]
    pictures = [("JPEG", [(0, 4, 1)], 1), ("PNG", [(0, 4, 1)], 1)]
    found = [
        Kind("reasoning", LOOP_S, reasoning, _change_reasoning, _packed, _check_reasoning, _inflate, 2**20),
        Kind("pictures", _PICTURES_S, pictures, _change_picture, _drawn, check_pictures, _open, 2**24),
    ]
    if grammars:
        use, most_s = Grammars(opened), DoorSettings().max_mask_ms / 1000
        patterns = ["a.b", "[a-z]+", "(a|b)*c"]
        schemas = [json.dumps({"type": "array", "items": {"anyOf": [{"type": "array", "items": {"const": 1}}] * 2}})]
        found += [
            Kind("patterns", most_s, patterns, _change_pattern, str, use.check, use.answer, 2**16),
            Kind("schemas", most_s, schemas, _change_schema, str, use.check, use.answer, 2**16),
        ]
    return found


def main(
    minutes: float = typer.Option(30.0, min=0.01, help="How long to climb, shared by the four kinds."),
    seed: int = typer.Option(1, help="The same seed makes the same changes of the same tries."),
    opened: bool = typer.Option(False, "--open", help="Leave out the door's checks: then each kind must be found."),
) -> None:
    """Climb, print the costliest request of each kind, and exit with 1 when it is a fault; with --open when none is."""
    climbs, draw = [Climb(kind) for kind in kinds(opened=opened)], random.Random(seed)
    end, found = time.monotonic() + minutes * 60, set[str]()
    while time.monotonic() < end and (not opened or len(found) < len(climbs)):
        for climb in climbs:
            if climb.kind.name not in found:
                climb.step(draw, opened)
            if opened and climb.best.seconds > climb.kind.most_s:
                found.add(climb.kind.name)
    print("| kind | tries | costliest | allowed | sent | resident |\n|---|---|---|---|---|---|")
    for climb in climbs:
        cost = climb.best
        row = f"| {climb.kind.name} | {climb.tries} | {cost.seconds * 1000:.0f} ms | {climb.kind.most_s * 1000:.0f} ms "
        print(row + f"| {cost.sent:,} | {cost.resident / 2**20:.0f} MiB |\n  {str(climb.example)[:300]}")
    over = {climb.kind.name for climb in climbs if climb.best.seconds > climb.kind.most_s}
    raise typer.Exit(len(over) < len(climbs) if opened else bool(over))


if __name__ == "__main__":
    run(lambda: typer.run(main))

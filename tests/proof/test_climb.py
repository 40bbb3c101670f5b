"""The climb keeps what cost more and changes that, and the door's checks end it."""

from __future__ import annotations

import json
import re
import time
from random import Random
from typing import Any

import pytest

from kimi_w4a8_eagle3.door.answers import Refusal
from proof.fuzz import climb
from proof.fuzz.climb import Climb, Kind

SCHEMA = json.dumps({"type": "array", "items": {"anyOf": [{"type": "array", "items": {"const": 1}}] * 2}})


def refuse_above(limit: int) -> Any:
    def check(value: str) -> None:
        if len(value) > limit:
            raise Refusal("too long")

    return check


def work(value: str, _: Random) -> float:
    return len(value) / 1000


def kind(**given: Any) -> Kind:
    change = lambda value, random: value + "x" * len(value)  # noqa: E731
    usual: dict[str, Any] = {"start": ["a"], "change": change, "encode": str, "work": work, "largest": 1000}
    return Kind(**{"name": "text", "most_s": 0.1, "check": refuse_above(50), **usual, **given})


@pytest.mark.parametrize(("opened", "longest"), [(False, 32), (True, 512)])
def test_it_climbs_to_what_the_door_admits_or_to_the_largest_request(
    opened: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = climb.tried  # its memory differs from run to run, and with it what is changed next
    monkeypatch.setattr(climb, "tried", lambda *words: tried(*words)._replace(resident=0))
    found, random = Climb(kind()), Random(1)
    for _ in range(12):  # each is a fork of this process with all that it has imported
        found.step(random, opened)
    assert len(found.example) == longest and found.best.seconds == longest / 1000


def test_a_killed_try_cost_the_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb, "_TRY_S", 0.1)

    def spin(*_: object) -> None:
        while True:
            pass

    assert climb.tried(kind(work=spin), "a", 1, opened=True).seconds == 0.1


def test_time_and_memory_of_a_try_are_its_own() -> None:
    def use(*_: object) -> None:
        held = bytearray(2**26)
        end = time.process_time() + 0.05
        while time.process_time() < end:
            held[0] = 1

    # Leave free memory in this process's heap that the 64 MiB of the try would fit in.
    block = bytearray(31 << 20)
    del block  # from now on glibc takes blocks of up to this size from the heap
    blocks, top = [bytearray(20 << 20) for _ in range(5)], [bytearray(2000) for _ in range(100)]
    del blocks
    cost = climb.tried(kind(work=use), "a", 1, opened=True)
    assert 0.05 <= cost.seconds < 5 and 2**25 < cost.resident < 2**27
    assert top
    assert climb.tried(kind(), "a" * 51, 1, opened=False).refused
    assert climb.tried(kind(), "a" * 20_000, 1, opened=True).refused


def test_reasoning_pictures_and_their_changes_are_what_the_door_and_the_engine_read() -> None:
    random, kinds = Random(1), {one.name: one for one in climb.kinds(grammars=False)}
    for one in kinds.values():
        value = one.start[0]
        for _ in range(5):
            value = one.change(value, random)
            if not climb.tried(one, value, 1, opened=False).refused:
                assert not climb.tried(one, value, 1, opened=True).refused


def test_a_schema_grows_to_arrays_beside_a_thousand_others() -> None:
    """Such a schema of 57.6 kB had masks of 9 to 12 s."""
    random, schema = Random(1), SCHEMA
    for _ in range(60):
        changed = climb._change_schema(schema, random)
        if schema.count('"array"') <= changed.count('"array"') and len(changed) < 2**16:
            schema = changed
    assert schema.count('"array"') > 500 < len(set(re.findall(r'"const": \d+', schema)))

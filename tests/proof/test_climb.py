"""The climb keeps what cost more and changes that, and the door's checks end it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st

from kimi_w4a8_eagle3.door.answers import Refusal
from proof.fuzz import climb
from proof.fuzz.climb import Climb, Cost, CostKind
from proof.fuzz.grammars import PATTERNS, SCHEMAS
from proof.fuzz.rounds import try_round

pytestmark = pytest.mark.slow


def refuse_above(limit: int) -> Any:
    def check(value: str) -> None:
        if len(value) > limit:
            raise Refusal("too long")

    return check


def work(value: str) -> float:
    return len(value) / 1000


def kind(**given: Any) -> CostKind:
    usual: dict[str, Any] = {"requests": st.integers(1, 10**6).map("x".__mul__), "work": work, "largest": 10_000}
    return CostKind(**{"name": "text", "most_s": 0.1, "check": refuse_above(50), **usual, **given})


@pytest.mark.parametrize(("opened", "longest"), [(False, 70_001), (True, 300_003)])
def test_it_climbs_to_what_the_door_admits_or_to_the_largest_request(
    opened: bool, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {False: 70_001, True: 300_003}
    monkeypatch.setattr(
        climb, "tried", lambda _, text, opened: Cost(len(text) / 1e6, 0, 1, refused=len(text) > limits[opened])
    )
    found = Climb(kind(most_s=1.0))
    for _ in range(3):
        found.round(opened, most=200)
    assert len(found.example) == longest and found.best.seconds == longest / 1e6 and found.tries > 100


def test_an_open_climb_ends_where_it_has_found_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb, "tried", lambda *_: Cost(1.0, 0, 1))
    found = Climb(kind())
    found.round(True)
    found.round(True)
    assert found.over and found.tries == 1


def test_a_killed_try_cost_the_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb, "_TRY_S", 0.1)

    def spin(*_: object) -> None:
        while True:
            pass

    assert climb.tried(kind(work=spin), "a", opened=True).seconds == 0.1
    assert climb.tried(kind(check=spin), "a", opened=False).refused  # as the door refuses it when its worker is killed


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
    cost = climb.tried(kind(work=use), "a", opened=True)
    assert 0.05 <= cost.seconds < 5 and 2**25 < cost.resident < 2**27
    assert top
    assert climb.tried(kind(), "a" * 51, opened=False).refused
    assert climb.tried(kind(), "a" * 20_000, opened=True).refused


@pytest.mark.parametrize("one", climb.kinds(grammars=False), ids=lambda one: one.name)
def test_pictures_are_what_the_door_and_the_engine_read(one: CostKind) -> None:
    served: list[bool] = []

    def attempt(request: Any) -> None:
        if not climb.tried(one, request, opened=False).refused:
            served.append(not climb.tried(one, request, opened=True).refused)

    try_round(one.requests, attempt, "1", 12, (Phase.generate,))
    assert served and all(served)


def test_a_schema_grows_to_hundreds_of_arrays_with_different_constants() -> None:
    """Such a schema of 57.6 kB had masks of 9 to 12 s."""
    found = Climb(kind(requests=SCHEMAS.map(json.dumps), work=len, most_s=1.0))

    def arrays(_: CostKind, text: str, opened: bool) -> Cost:
        return Cost(min(text.count('"array"'), len(set(re.findall(r'"const": \d+', text)))) / 1000, 0, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climb, "tried", arrays)
        for _ in range(4):
            found.round(False, most=100)
    assert found.best.seconds > 0.5


@pytest.mark.parametrize("strategy", [PATTERNS, SCHEMAS.map(json.dumps)], ids=["patterns", "schemas"])
def test_grammars_are_of_many_forms_and_compile(strategy: Any) -> None:
    drawn: list[str] = []
    try_round(strategy, drawn.append, "1", 60, (Phase.generate,))
    assert len(set(drawn)) > 40
    for text in drawn:
        json.loads(text) if text.startswith("{") else re.compile(text.replace("{1,1024}", "{1,9}"))

"""The verdicts of a soak: a planted leak is found, noise is not."""

from __future__ import annotations

import random

import pytest

from proof.load.load_request import ClientOutcome, Manner, Record
from proof.soak.findings import (
    MIB,
    Bounds,
    Growth,
    check_answers,
    check_empty,
    check_level,
    check_memory,
    check_same_processes,
    growth,
)

BOUNDS = Bounds()
MINUTES_20 = [5.0 * i for i in range(240)]


def memory(leak_mib_h: float = 0.0, noise_mib: float = 0.0, warm_up_mib: float = 0.0, seed: int = 0) -> list[float]:
    """20 minutes of a process of 500 MiB: a leak, noise that lasts a while, and a warm-up over the first third."""
    drawn = random.Random(seed)
    noise, values = 0.0, []
    for at in MINUTES_20:
        noise = 0.8 * noise + drawn.gauss(0.0, noise_mib)
        warm = warm_up_mib * min(1.0, at / 400.0)
        values.append(MIB * (500.0 + leak_mib_h * at / 3600.0 + noise + warm))
    return values


def flat(values: list[float]) -> bool:
    [finding] = check_memory(MINUTES_20, {"scheduler": values}, BOUNDS)
    return finding.passed


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("leak_mib_h", "is_flat"), [(0.0, True), (2 * BOUNDS.growth_mib_h, False)])
def test_a_leak_is_found_in_noise_and_noise_is_no_leak(leak_mib_h: float, is_flat: bool, seed: int) -> None:
    assert flat(memory(leak_mib_h, noise_mib=0.5, seed=seed)) == is_flat


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        (memory((BOUNDS.negligible_mib_h + BOUNDS.growth_mib_h) / 2, noise_mib=0.01), False),
        (memory(BOUNDS.negligible_mib_h / 2, noise_mib=0.01), True),
        (memory(warm_up_mib=300.0, noise_mib=0.5), True),
    ],
    ids=["a slow leak below the bound, without noise", "certain but negligible growth", "a warm-up in the first half"],
)
def test_what_is_flat(values: list[float], is_flat: bool) -> None:
    assert flat(values) == is_flat


def test_one_spike_is_no_leak() -> None:
    values = memory(noise_mib=0.1)
    for i in range(230, 240):
        values[i] += 200 * MIB
    assert flat(values)


def test_prompts_that_need_ever_more_memory_for_a_moment_are_no_leak() -> None:
    values = [v + (0 if i % 4 == 0 else i * MIB) for i, v in enumerate(memory(noise_mib=0.1))]
    assert flat(values)


def test_a_steep_slope_is_not_flat_however_uncertain_it_is() -> None:
    assert not Growth(BOUNDS.growth_mib_h + 1, -50.0, 100.0, 10).flat(BOUNDS)
    assert Growth(BOUNDS.growth_mib_h - 1, -50.0, 100.0, 10).flat(BOUNDS)


def test_the_slope_is_that_of_the_planted_leak() -> None:
    found = growth(MINUTES_20, memory(leak_mib_h=120.0, noise_mib=0.2), BOUNDS.block_s)
    assert found is not None
    assert found.mib_per_hour == pytest.approx(120.0, rel=0.1)
    assert found.low < 120.0 < found.high
    assert found.blocks == 10


def test_a_soak_that_is_too_short_gives_no_verdict_of_flat() -> None:
    [finding] = check_memory([0.0, 5.0, 10.0], {"router": [1.0, 1.0, 1.0]}, BOUNDS)
    assert not finding.passed
    assert "longer" in finding.found


def test_descriptors_up_to_the_allowance_are_kept_connections_beyond_it_a_leak() -> None:
    before = {"router": 20, "replica-0 engine": 40}
    assert check_level("fds", before, {"router": 28, "replica-0 engine": 38}, allowance=8).passed
    over = check_level("fds", before, {"router": 29, "replica-0 engine": 38}, allowance=8)
    assert not over.passed
    assert "router: 20 -> 29" in over.found


def test_a_process_that_was_replaced_is_a_finding() -> None:
    before = {"router": 10, "replica-0 scheduler": 11}
    assert check_same_processes(before, dict(before)).passed
    assert not check_same_processes(before, before | {"replica-0 scheduler": 12}).passed
    assert not check_same_processes(before, {"router": 10}).passed


def test_a_slot_that_stays_taken_and_a_replica_that_is_silent_are_findings() -> None:
    both = ("replica-0", "replica-1")
    assert check_empty("KV slots", {"replica-0": 0.0, "replica-1": 0.0}, both).passed
    assert "replica-1: 64" in check_empty("KV slots", {"replica-0": 0.0, "replica-1": 64.0}, both).found
    assert not check_empty("KV slots", {"replica-0": 0.0, "replica-1": 64.0}, both).passed
    assert not check_empty("KV slots", {"replica-0": 0.0}, both).passed
    assert not check_empty("KV slots", {}, ()).passed


def answered(
    manner: Manner = Manner.STREAM, outcome: ClientOutcome = ClientOutcome.OK, status: int | None = 200
) -> Record:
    return Record(manner, 0, 0.0, 1.0, outcome, status=status)


GOOD = [
    answered(),
    answered(Manner.PLAIN),
    answered(Manner.SLOW),
    answered(Manner.LEAVES_STREAM, ClientOutcome.LEFT),
    answered(Manner.LEAVES_PLAIN),  # the answer came before its client would have left
    answered(Manner.STREAM, ClientOutcome.REFUSED, 503),
    answered(Manner.STREAM, ClientOutcome.REFUSED, 429),
    answered(Manner.BAD, ClientOutcome.REFUSED, 400),
    answered(Manner.BAD, ClientOutcome.REFUSED, 413),
]
FAULTS = {
    "truncated": answered(outcome=ClientOutcome.TRUNCATED),
    "wrong": answered(Manner.SLOW, ClientOutcome.WRONG),
    "cut": answered(outcome=ClientOutcome.CUT),
    "hung": answered(Manner.PLAIN, ClientOutcome.HUNG, None),
    "unreachable": answered(outcome=ClientOutcome.UNREACHABLE, status=None),
    "a good request refused": answered(outcome=ClientOutcome.REFUSED, status=400),
    "500": answered(outcome=ClientOutcome.FAILED, status=500),
    "500 for a bad request": answered(Manner.BAD, ClientOutcome.FAILED, 500),
    "503 for a bad request": answered(Manner.BAD, ClientOutcome.REFUSED, 503),
    "a bad request answered": answered(Manner.BAD, ClientOutcome.WRONG, 200),
}


def test_answers_that_may_come_pass() -> None:
    assert [finding for finding in check_answers(GOOD) if not finding.passed] == []


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_one_answer_that_must_not_come_is_a_finding(name: str) -> None:
    assert any(not finding.passed for finding in check_answers([*GOOD, FAULTS[name]]))


def test_a_soak_without_answers_is_no_success() -> None:
    assert not any(finding.passed for finding in check_answers([]))

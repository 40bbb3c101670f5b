"""Findings of a soak: pure functions from samples and outcomes to findings, each passed or failed with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import scipy  # it imports `scipy.stats` at its first use, which takes a second

from kimi_w4a8_eagle3.base.finding import Finding, checked

from ..load.load_request import ClientOutcome, Manner, Record

MIB = 2**20
_HOUR_S = 3600.0
_OVERLOAD = frozenset({429, 503})


@dataclass(frozen=True)
class Bounds:
    """Bounds below which a soak passes.

    growth_mib_h: memory of one process, projected to an hour. negligible_mib_h: a growth that is certain, but smaller
    than this, is not held against a process. block_s: of so many seconds the least sample counts: a leak lifts it, a
    long prompt that needs memory for a moment does not, and neighbours that repeat each other are no more evidence
    than one of them. The others: of one process, after the load
    more than before it; connections that are kept open and worker threads of a pool are no leak.
    """

    growth_mib_h: float = 32.0
    negligible_mib_h: float = 4.0
    block_s: float = 60.0
    fds: int = 24
    threads: int = 8
    close_wait: int = 4


@dataclass(frozen=True)
class Growth:
    """Memory of a process over the second half of a soak: slope in MiB an hour, and its 95 % interval."""

    mib_per_hour: float
    low: float
    high: float
    blocks: int

    def flat(self, bounds: Bounds) -> bool:
        """Below the bound, and not certainly more than negligible."""
        return self.mib_per_hour < bounds.growth_mib_h and self.low <= bounds.negligible_mib_h

    def __str__(self) -> str:
        return f"{self.mib_per_hour:+.1f} MiB/h ({self.low:+.1f} to {self.high:+.1f})"


def growth(times: Sequence[float], values: Sequence[float], block_s: float) -> Growth | None:
    """Theil-Sen slope of the floor of a series of bytes, over its second half.

    None when that half has fewer than four blocks.
    """
    half = (times[0] + times[-1]) / 2 if times else 0.0
    blocks: dict[int, list[tuple[float, float]]] = {}
    for at, value in zip(times, values, strict=True):
        if at >= half:
            blocks.setdefault(int((at - half) // block_s), []).append((at, value))
    if len(blocks) < 4:
        return None
    floor = [min(block, key=lambda sample: sample[1]) for block in blocks.values()]
    slope, _, low, high = scipy.stats.theilslopes([value for _, value in floor], [at for at, _ in floor], alpha=0.95)
    unit = _HOUR_S / MIB
    return Growth(float(slope) * unit, float(low) * unit, float(high) * unit, len(floor))


def check_memory(times: Sequence[float], by_process: Mapping[str, Sequence[float]], bounds: Bounds) -> list[Finding]:
    """The memory of every process is flat. times and values of the load alone, without start and rest."""
    findings = []
    for name, values in by_process.items():
        found = growth(times, values, bounds.block_s)
        if found is None:
            findings.append(checked(f"memory of {name}", "too few samples for a slope: soak longer", "", False))
            continue
        detail = f"{found}, {values[0] / MIB:.0f} -> {values[-1] / MIB:.0f} MiB"
        findings.append(checked(f"memory of {name}", detail, "", found.flat(bounds)))
    return findings


def check_level(what: str, before: Mapping[str, int], after: Mapping[str, int], allowance: int) -> Finding:
    """A count of every process after the load is at most `allowance` above the one before it."""
    more = {name: after[name] - count for name, count in before.items() if name in after}
    if not more:
        return checked(what, "no process was seen before and after", "", False)
    name = max(more, key=lambda key: more[key])
    detail = f"at most {more[name]:+d}, {name}: {before[name]} -> {after[name]} ({allowance} more are allowed)"
    return checked(what, detail, "", more[name] <= allowance)


def check_same_processes(before: Mapping[str, int], after: Mapping[str, int]) -> Finding:
    """Every process lived from the first to the last sample (process ids by name)."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return checked("no process died", ", ".join(changed) or f"{len(before)} processes", "", not changed)


def check_empty(what: str, left: Mapping[str, float], expected: Collection[str]) -> Finding:
    """Nothing is in use when the load has ended (KV slots, running requests), on every expected replica."""
    silent = sorted(set(expected) - left.keys())
    used = [f"{name}: {value:g}" for name, value in left.items() if value] + [f"{name}: no answer" for name in silent]
    if not expected:
        return checked(what, "no replica was seen", "", False)
    return checked(what, ", ".join(used) or f"0 on {len(left)} replicas", "", not used)


def check_answers(records: Sequence[Record]) -> list[Finding]:
    """Every answer is the reference, and every error is one that its client deserved or could retry."""
    bad = [record for record in records if record.manner is Manner.BAD]
    asked = [record for record in records if record.manner is not Manner.BAD]
    wrong = [one for one in asked if one.outcome in (ClientOutcome.TRUNCATED, ClientOutcome.WRONG)]
    lost = (ClientOutcome.CUT, ClientOutcome.HUNG, ClientOutcome.UNREACHABLE)
    refused = [one for one in asked if one.outcome is ClientOutcome.REFUSED and one.status not in _OVERLOAD]
    failed = [one for one in records if one.outcome is ClientOutcome.FAILED or (one.status or 0) >= 500]
    answered = [one for one in bad if one.outcome is not ClientOutcome.REFUSED or not 400 <= (one.status or 0) < 500]
    return [
        _none("streamed, whole and slowly read answers equal the reference", asked, wrong),
        _none("no broken or silent connection", asked, [one for one in asked if one.outcome in lost]),
        _none("no good request is refused but for overload", asked, refused),
        _none("no 5xx but overload", records, [one for one in failed if one.status not in _OVERLOAD]),
        _none("bad requests get 4xx with a message", bad, answered),
    ]


def outcomes(records: Sequence[Record]) -> dict[str, Counter[str]]:
    """Number of requests by manner and outcome."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        found.setdefault(record.manner.value, Counter())[record.outcome.value] += 1
    return found


def _none(what: str, records: Sequence[Record], faults: Sequence[Record]) -> Finding:
    if not records or faults:
        first = faults[0] if faults else None
        example = f"; first: {first.manner.value}, {first.outcome.value}, {first.detail[:160]}" if first else ""
        return checked(what, f"{len(faults)} of {len(records)} requests{example}", "", False)
    return checked(what, f"{len(records)} of {len(records)} requests", "", True)

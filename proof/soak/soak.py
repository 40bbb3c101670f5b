"""One soak from the first question to the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding

from ..load.load import ClientLoad
from ..load.load_request import Manner, Record
from .findings import Bounds, check_answers, check_empty, check_level, check_memory, check_same_processes
from .fleet import Subject
from .questions import MIX, Oversized, leave_after, questions
from .watch import RUNNING, USED, WAITING, SoakSample, Watch

# Rest before and after the load: connections that idle are closed, aborted requests are cleared away.
REST_S = 20.0
_HANG_S = 300.0
_SLOW_CLIENTS = 1
_TICK_S = 1.0


@dataclass(frozen=True)
class Soak:
    """Records of one soak. samples: from before the load to after the rest. began, ended: of the load, Unix seconds."""

    began: float
    ended: float
    records: Sequence[Record]
    samples: Sequence[SoakSample]
    before: SoakSample
    after: SoakSample
    pids_before: dict[str, int]
    pids_after: dict[str, int]


@dataclass(frozen=True)
class SoakPlan:
    """Length of the load, number of clients, and the seed of everything they do."""

    minutes: float
    concurrency: int
    seed: int


# stage, seconds in it, records, last sample
OnProgress = Callable[[str, float, Sequence[Record], SoakSample | None], None]


def soak(subject: Subject, folder: Path, plan: SoakPlan, on_progress: OnProgress) -> Soak:
    """Load the fleet; one client reads slowly, and one more than planned sends oversized bodies."""
    on_progress("reference answers", 0.0, (), None)
    asked = questions(subject.url, plan.seed)
    short = [question for question in asked if not question.counted]
    tree = subject.tree
    with Watch(subject.ops_url, tree, folder / "samples.jsonl") as watch:
        _rest(watch, "rest before", on_progress)
        before, pids_before = watch.look(), tree.pids() if tree else {}
        steady = ClientLoad(
            subject.url,
            asked,
            plan.concurrency - _SLOW_CLIENTS,
            mix=MIX,
            hang_s=_HANG_S,
            leave_after=leave_after(plan.seed),
        )
        slow = ClientLoad(subject.url, short, _SLOW_CLIENTS, mix={Manner.SLOW: 1}, hang_s=_HANG_S)
        oversized = Oversized(subject.url)
        began = time.time()
        with steady, slow, oversized:
            while (passed := time.time() - began) < 60 * plan.minutes:
                on_progress("load", passed, _all(steady, slow, oversized), watch.samples[-1] if watch.samples else None)
                if steady.wait(0) or slow.wait(0):
                    raise KimiError("the load ended before its time", where=str(folder), remedy="see the trace above")
                time.sleep(_TICK_S)
            ended = time.time()
            on_progress("the last requests end", 0.0, _all(steady, slow, oversized), None)
        _rest(watch, "rest after", on_progress)
        after, pids_after = watch.look(), tree.pids() if tree else {}
        samples = [*watch.samples, after]
    records = sorted(_all(steady, slow, oversized), key=lambda record: record.ended)
    return Soak(began, ended, records, samples, before, after, pids_before, pids_after)


def judge(found: Soak, bounds: Bounds) -> list[Finding]:
    """Every finding of a soak; processes are judged where they could be seen."""
    findings = check_answers(found.records)
    for what, name in (("every KV slot is free again", USED), ("no request runs", RUNNING), ("none waits", WAITING)):
        left = {replica: values[name] for replica, values in found.after.engines.items()}
        findings.append(check_empty(what, left, found.before.engines.keys()))
    if not found.before.held:
        return findings
    findings.append(check_same_processes(found.pids_before, found.pids_after))
    for what, count, allowance in (
        ("open descriptors", "fds", bounds.fds),
        ("threads", "threads", bounds.threads),
        ("connections that only the peer has closed", "close_wait", bounds.close_wait),
    ):
        before, after = (
            {name: getattr(held, count) for name, held in sample.held.items()} for sample in (found.before, found.after)
        )
        findings.append(check_level(what, before, after, allowance))
    shared = [{"the fleet": sample.shared_memory} for sample in (found.before, found.after)]
    findings.append(check_level("files in /dev/shm", shared[0], shared[1], 0))
    under_load = [sample for sample in found.samples if found.began <= sample.at <= found.ended]
    names = [name for name in found.before.held if all(name in sample.held for sample in under_load)]
    memory = {name: [float(sample.held[name].uss) for sample in under_load] for name in names}
    return findings + check_memory([sample.at for sample in under_load], memory, bounds)


def _all(*loads: ClientLoad | Oversized) -> list[Record]:
    return [record for load in loads for record in load.records]


def _rest(watch: Watch, stage: str, on_progress: OnProgress) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < REST_S:
        on_progress(stage, passed, (), watch.samples[-1] if watch.samples else None)
        time.sleep(_TICK_S)

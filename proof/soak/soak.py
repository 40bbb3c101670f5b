"""One soak from the first question to the verdict."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding

from ..load.engine_loads import RUNNING, USED, WAITING
from ..load.load import ClientLoad
from ..load.load_questions import Question, conversation, known_questions
from ..load.load_request import Manner, Record
from ..tiny.problems import problems
from .findings import Bounds, check_answers, check_empty, check_level, check_memory, check_same_processes
from .watch import SoakSample, Watch

# Of fourteen requests: nine are answered, three are left by their clients, two must be refused.
MIX: Mapping[Manner, int] = {
    Manner.STREAM: 6,
    Manner.LEAVES_STREAM: 2,
    Manner.PLAIN: 3,
    Manner.BAD: 2,
    Manner.LEAVES_PLAIN: 1,
}
_LEAVE_AFTER = 12  # pieces at most, or tenths of a second
# Earlier turns (about 80 tokens each) and answer tokens of questions whose answer is not known beforehand.
_LONG = ((12, 24), (40, 16), (0, 200), (12, 8), (0, 300), (20, 48), (0, 8), (0, 400))
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


@dataclass(frozen=True)
class SoakPlan:
    """Length of the load, number of clients, and the seed of everything they do."""

    minutes: float
    concurrency: int
    seed: int


def questions(base_url: str, seed: int, known: int = 24) -> list[Question]:
    """Questions in an order of their own for every seed.

    Three quarters have a known answer. The others are long in prompt or answer and run for an exact number of tokens;
    the model wavers there, so their text is compared with the server's own list of its tokens.
    """
    found = known_questions(base_url, known, seed=seed)
    drawn = iter(problems("held_out", sum(turns + 1 for turns, _ in _LONG), seed=seed + 1))
    for turns, max_tokens in _LONG:
        asked = conversation(drawn, turns)
        found.append(Question(found[0].model, asked, max_tokens, ignore_eos=True, counted=True))
    random.Random(seed).shuffle(found)
    return found


def soak(
    url: str, ops_url: str, root: psutil.Process | None, folder: Path, plan: SoakPlan, say: Callable[[str], object]
) -> Soak:
    """Load the fleet, with one client that reads slowly; `root` is its process, if it runs on this machine."""
    say("reference answers")
    asked, drawn = questions(url, plan.seed), random.Random(plan.seed)
    short = [question for question in asked if not question.counted]
    with Watch(ops_url, root, folder / "samples.jsonl") as watch:
        say("rest before the load")
        time.sleep(REST_S)
        before = watch.look()
        steady = ClientLoad(
            url, asked, plan.concurrency - _SLOW_CLIENTS, mix=MIX, hang_s=_HANG_S,
            leave_after=lambda: drawn.randint(1, _LEAVE_AFTER),
        )  # fmt: skip
        slow = ClientLoad(url, short, _SLOW_CLIENTS, mix={Manner.SLOW: 1}, hang_s=_HANG_S)
        began = time.time()
        with steady, slow:
            while (passed := time.time() - began) < 60 * plan.minutes:
                counts = Counter(record.outcome.value for record in steady.records + slow.records)
                seen = ", ".join(f"{n} {name}" for name, n in counts.most_common())
                say(f"load for {passed:.0f} of {60 * plan.minutes:.0f} s: {seen}")
                if steady.wait(0) or slow.wait(0):
                    raise KimiError("the load ended before its time", where=str(folder), remedy="see the trace above")
                time.sleep(_TICK_S)
            ended = time.time()
            say("the last requests end")
        say("rest after the load")
        time.sleep(REST_S)
        after = watch.look()
        samples = [*watch.samples, after]
    records = sorted(steady.records + slow.records, key=lambda record: record.ended)
    return Soak(began, ended, records, samples, before, after)


def judge(found: Soak, bounds: Bounds) -> list[Finding]:
    """Every finding of a soak; processes are judged where they could be seen."""
    findings = check_answers(found.records)
    for what, name in (("every KV slot is free again", USED), ("no request runs", RUNNING), ("none waits", WAITING)):
        left = {replica: values[name] for replica, values in found.after.engines.items()}
        findings.append(check_empty(what, left, found.before.engines.keys()))
    if not found.before.held:
        return findings
    ids = ({name: held.pid for name, held in sample.held.items()} for sample in (found.before, found.after))
    findings.append(check_same_processes(*ids))
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

"""Shared parts of the cases in fault_cases.py: the running server, the row of the table, a fault under load."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.metrics import read_once
from proof.load.engine_loads import RUNNING, engine_loads
from proof.load.load import ClientLoad, forbidden, write_records
from proof.load.load_questions import Question, endless_question, known_questions
from proof.load.load_request import ClientOutcome, Record
from proof.load.served import ServedEngine

CLIENTS = 6
STALL_S = 15
ARGUMENTS = ("--set", f"options.progress_timeout_s={STALL_S}")
BEFORE_S = 4.0
AFTER_S = 4.0
_NOTICE_S = 240.0
WHOLE_S = 900.0
VISIBLE = frozenset({ClientOutcome.OK, ClientOutcome.CUT, ClientOutcome.FAILED, ClientOutcome.REFUSED})
ONLY_OK = frozenset({ClientOutcome.OK})


@dataclass
class FaultRow:
    """Row of the fault table. problems: reasons why the case failed, none if it passed."""

    clients: str = ""
    detected_s: float | None = None
    whole_s: float | None = None
    left: str = "nothing"
    remark: str = ""
    problems: list[str] = field(default_factory=list)

    def expect(self, condition: bool, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not condition:
            self.problems.append(problem)

    def leaves(self, left: object) -> FaultRow:
        """Note what the case left behind, which must be nothing; return the row."""
        self.left = str(left)
        self.expect(not left, f"left behind: {left}")
        return self

    def judge(self, records: Sequence[Record], allowed: frozenset[ClientOutcome]) -> None:
        """Count what clients saw; a wrong or shortened answer, or an outcome that is not allowed, is a problem."""
        found = Counter(record.outcome for record in records)
        self.clients = ", ".join(f"{number:,} {outcome.value}" for outcome, number in found.most_common())
        for record in forbidden(records):
            self.problems.append(f"{record.outcome.value}: {record.detail}")
        others = {outcome: number for outcome, number in found.items() if outcome not in allowed}
        self.expect(not others, f"not expected: {', '.join(f'{n} {o.value}' for o, n in others.items())}")
        self.expect(found[ClientOutcome.OK] > 0, "no request was answered")


class FaultStage:
    """A running server, the questions whose answers are known, and where records go."""

    def __init__(self, server: ServedEngine, folder: Path) -> None:
        self.server, self.folder = server, folder
        server.wait_ready(WHOLE_S)
        self.questions = known_questions(server.base_url)

    def load(self, clients: int = CLIENTS, **options: object) -> ClientLoad:
        """A load of ordinary clients."""
        return ClientLoad(self.server.base_url, self.questions, clients, hang_s=240.0, **options)  # type: ignore[arg-type]

    def endless(self, tokens: int) -> Question:
        """A request that runs for so many tokens."""
        return endless_question(self.questions[0].model, tokens)

    def aborted(self) -> float:
        """Requests that the engine has aborted so far."""
        return read_once(*self.server.address).total("sglang:num_aborted_requests_total") or 0.0

    def running(self) -> int:
        """Requests that run now."""
        return engine_loads(self.server.address)[RUNNING]

    def wait_idle(self, timeout_s: float = 60.0) -> float:
        """Seconds until the engine runs no request; the time limit when one still does."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            if self.running() == 0:
                return time.monotonic() - began
            time.sleep(0.1)
        return timeout_s


@dataclass(frozen=True)
class FaultCase:
    """A fault. own: it ends the server, or needs another one than the rest."""

    name: str
    title: str
    run: Callable[[FaultStage], FaultRow]
    own: bool = False


def under_load(
    stage: FaultStage, inflict: Callable[[], object], allowed: frozenset[ClientOutcome], name: str
) -> FaultRow:
    """Break something in the middle of a load and wait until the engine is ready again."""
    row, server = FaultRow(), stage.server
    before = server.debris(patience_s=0)
    with stage.load() as load:
        time.sleep(BEFORE_S)
        at = time.time()
        inflict()
        noticed = server.wait_event(lambda e: e.event in ("down", "stalled"), at, _NOTICE_S)
        row.detected_s = noticed.time - at
        row.whole_s = server.wait_ready(WHOLE_S, since=at) - at
        time.sleep(AFTER_S)
    write_records(stage.folder / f"{name}.jsonl", load.records)
    row.judge(load.records, allowed)
    running = [record for record in load.records if record.began <= at <= record.ended]
    seen = Counter(record.outcome.value for record in running)
    row.remark = f"of {len(running)} running {', '.join(f'{n} {o}' for o, n in seen.items())}"
    errors = [record.ended - at for record in load.records if record.outcome is not ClientOutcome.OK]
    if errors:
        row.remark += f"; last error after {max(errors):.1f} s"
    return row.leaves(server.debris(before))


@contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[Path]:
    """A tmpfs mounted at a new folder; KimiError where that is not allowed."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise KimiError(f"a small disk cannot be mounted: {mounted.stderr.strip()}", remedy="run as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def kimi_command(words: Sequence[str]) -> list[str]:
    """The words that start `kimi-w4a8` from this interpreter."""
    return [sys.executable, "-m", "kimi_w4a8_eagle3.cli", *words]

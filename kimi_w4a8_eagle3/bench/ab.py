"""`kimi-w4a8 bench ab`: two sides or more, each server in turn, in an order that cancels what drifts.

The servers do not run together: eight GPUs hold one, and a second process would disturb the first. With two rounds the
order is A B B A, so that warming, throttling and a neighbour's load hit all sides alike. All sides get the same
prompts, repetition by repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import UsageError
from ..base.extras import require
from ..base.run_dir import new_run_dir
from .runs import RunWriter
from .side import Say, Side, Texts, measure_points, recorded, require_usable, running
from .texts import prepare
from .workloads import Workload


@dataclass(frozen=True)
class Plan:
    """repeats: measurements of each workload and side; they are spread evenly over `rounds` server starts."""

    sides: Sequence[Side]
    workloads: Sequence[Workload]
    repeats: int
    rounds: int

    def __post_init__(self) -> None:
        names = [side.name for side in self.sides]
        if same := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two sides are {same[0]}", where="--a, --b", expected="different sides")
        if not 1 <= self.rounds <= self.repeats:
            raise UsageError(
                f"{self.repeats} repetition(s) in {self.rounds} round(s)",
                where="--repeats, --rounds",
                expected="at least one repetition in every round, and at least one round",
            )

    def blocks(self) -> list[tuple[Side, list[int]]]:
        """(side, repetition numbers) in the order measured; neighbours of one side are one block, one server start."""
        shares = [list(range(self.repeats))[start :: self.rounds] for start in range(self.rounds)]
        blocks: list[tuple[Side, list[int]]] = []
        for number, share in enumerate(shares):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                if blocks and blocks[-1][0] is side:
                    blocks[-1][1].extend(share)
                else:
                    blocks.append((side, list(share)))
        return blocks


def ab(plan: Plan, texts: Texts, runs: Path, say: Say, settings: list[str], api_key: str | None = None) -> Path:
    """Measure all sides; returns the run directory. Raises KimiError; what was measured before stays.

    api_key: what this environment makes the servers ask for.
    """
    require("sglang")
    names = [side.name for side in plan.sides]
    launches = {side.name: side.launch(settings) for side in plan.sides}
    folder = new_run_dir("ab-" + "-".join(names).replace(":", "-"), runs)
    with recorded(folder, "ab", names, launches, None) as writer:
        datasets = {}
        for workload in plan.workloads:
            place = folder / workload.name
            place.mkdir()
            datasets[workload.name] = prepare(workload, place, texts.sharegpt, texts.prompts)
        for number, (side, repetitions) in enumerate(plan.blocks()):
            _block(plan, side, repetitions, datasets, writer, folder / f"server-{number}.log", settings, say, api_key)
    require_usable(writer)
    return folder


def _block(
    plan: Plan,
    side: Side,
    repetitions: list[int],
    datasets: dict[str, Path],
    writer: RunWriter,
    log: Path,
    settings: list[str],
    say: Say,
    api_key: str | None,
) -> None:
    """One server start: every workload once for each of the repetition numbers, workloads interleaved."""
    with running(side, side.launch(settings), log, say, api_key=api_key) as subject:
        for repetition in repetitions:
            for workload in plan.workloads:
                fresh = workload.model_copy(update={"seeds": [seed + 1000 * repetition for seed in workload.seeds]})
                dataset = datasets[workload.name]
                measure_points(subject, fresh, dataset, writer, say, repetition, examine=repetition == 0)

"""Measuring of workloads on servers, one at a time, in an order that cancels drift.

The servers of a comparison do not run together: eight GPUs hold one, and a second process would disturb the first. With
two rounds the order is A B B A, so that warming, throttling and a neighbour's load affect all sides alike. All sides
get the same prompts in each repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import product
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.installed import require
from kimi_w4a8_eagle3.engine.client import EngineClient, Refused
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.data_file import require_trusted_tokenizer
from ..base.server_under_test import Say, Server, Target
from .measure import examine_text, measure
from .runs import Run, RunResult, read_run
from .texts import Texts, placed
from .workloads import CHAT_BACKEND, Workload


@dataclass(frozen=True)
class Plan:
    """What to measure. repeats: measurements of each workload and side, spread evenly over `rounds` server starts."""

    sides: Sequence[Target]
    workloads: Sequence[Workload]
    repeats: int = 1
    rounds: int = 1

    def __post_init__(self) -> None:
        names = [side.name for side in self.sides]
        if same := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two sides have the name {same[0]}", where="--a, --b", expected="different sides")
        if not 1 <= self.rounds <= self.repeats:
            raise UsageError(
                f"{self.repeats} repetition(s) in {self.rounds} round(s)",
                where="--repeats, --rounds",
                expected="at least one repetition in every round, and at least one round",
            )

    @property
    def name(self) -> str:
        """Name of the run's folder: the workloads of one side, or the sides."""
        names = self.workloads if len(self.sides) == 1 else self.sides
        return "-".join(("bench", *(one.name.replace(":", "-") for one in names)))

    def blocks(self) -> list[tuple[Target, list[int]]]:
        """Return (side, repetition numbers) in measuring order; a block is one server start."""
        shares = [list(range(self.repeats))[start :: self.rounds] for start in range(self.rounds)]
        blocks: list[tuple[Target, list[int]]] = []
        for number, share in enumerate(shares):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                if blocks and blocks[-1][0] is side:
                    blocks[-1][1].extend(share)
                else:
                    blocks.append((side, list(share)))
        return blocks


def bench(plan: Plan, texts: Texts, runs: Path, say: Say, resume: Path | None = None) -> Path:
    """Carry out a plan and return the run's folder.

    resume: the folder of a run to finish. A server starts only if one of its points is missing. Raises KimiError and
    keeps finished measurements, marked incomplete. What may fail early does so before a folder exists.
    """
    require("sglang")  # its load generator also measures running servers
    require("datasets")  # which the generator imports
    content = {work.name: texts.prepare(work) for work in plan.workloads if not texts.on_hub(work)}
    for side in plan.sides:
        if side.base_url is not None:
            say(f"{side.name}: asking the server")
            for workload in plan.workloads:
                _check(side.connected, workload)
        side.check()
    earlier, blocks = resumed(resume, plan) if resume else None, plan.blocks()
    content |= {work.name: texts.prepare(work) for work in plan.workloads if texts.on_hub(work)}  # perhaps 600 MB
    run = earlier or begun(runs, plan)
    datasets = {name: placed(found, run.folder, name if len(content) > 1 else "") for name, found in content.items()}
    with saved(run, say):
        for number, (side, repetitions) in enumerate(blocks):
            if left(run, side.name, plan.workloads, repetitions):
                log = run.folder / ("server.log" if len(blocks) == 1 else f"server-{number}.log")
                with side.running(log, say) as server:
                    for repetition, workload in product(repetitions, plan.workloads):
                        fresh = seeded(workload, repetition)
                        measure_points(server, fresh, datasets[workload.name], run, say, repetition)
    if bad := [found for found in run.result.measurements if not found.usable]:
        raise KimiError(
            f"{len(bad)} of {len(run.result.measurements)} measurements are unusable: {bad[0].problems[0]}",
            where=str(run.folder),
            expected="every request answered at the requested length, by a server without other clients",
            remedy="read the server's log and measure again; reports leave out the marked measurements",
        )
    return run.folder


def _check(server: Server, workload: Workload) -> None:
    require_room(server, workload)
    if workload.backend != CHAT_BACKEND:
        with EngineClient(*server.engine) as client:
            try:
                client.generate("one", 1)
            except Refused as refused:
                if refused.status != HTTPStatus.NOT_FOUND:
                    raise
                raise KimiError(
                    "the gateway serves no /generate, and the load generator asks the engine itself",
                    where=server.base_url,
                    expected="the engine's own address",
                    remedy="--runs RUNS, where `kimi-w4a8 serve` keeps its folders, or --base-url RUNS/RUN/engine.json",
                ) from refused


def begun(runs: Path, plan: Plan) -> Run:
    """Create the folder of a run below `runs`."""
    local = all(target.local for target in plan.sides)
    gpus = [device.arch for device in Machine.detect().devices] if local else []
    sides = {side.name: side for side in plan.sides}
    run = Run.begin("bench", runs, sides, plan.name, hardware={"known": local, "gpus": gpus})
    run.result = RunResult(status="running", sides=list(sides))
    return run


def resumed(folder: Path, plan: Plan) -> Run:
    """Return the run with its usable measurements. Raises KimiError if it measured something else."""
    run, planned = read_run(folder), {workload.name: workload for workload in plan.workloads}
    other = [
        found.workload.name
        for found in run.usable
        if found.workload.name not in planned
        or seeded(planned[found.workload.name], found.repetition_index) != found.workload
    ]
    sides = [side.name for side in plan.sides]
    if run.result.sides != sides or other:
        raise KimiError(
            f"this run measured {f'another {other[0]}' if other else ', '.join(run.result.sides)}",
            where=str(folder),
            expected=f"a run of {', '.join(sides)} with the workloads of this command",
            remedy="repeat the command of that run with --resume, or start a new run without it",
        )
    run.result.status, run.result.reason, run.result.measurements = "running", "", run.usable
    return run


@contextmanager
def saved(run: Run, say: Say) -> Iterator[None]:
    """Mark the run's result complete or incomplete at the end of the block."""
    run.save()
    try:
        with run.continuable(say):
            yield
    except BaseException as error:
        run.result.status, run.result.reason = "incomplete", (str(error) or type(error).__name__).splitlines()[0]
        with suppress(KimiError):  # on a full disk this fails too, and the first error says more
            run.save()
        raise
    run.result.status = "complete"
    run.save()


def left(run: Run, side: str, workloads: Sequence[Workload], repetitions: Sequence[int]) -> bool:
    """True if a point of these workloads and repetitions was not measured yet."""
    return any(
        not run.measured(point, side, number)
        for number, work in product(repetitions, workloads)
        for point in seeded(work, number).points()
    )


def seeded(workload: Workload, repetition: int) -> Workload:
    """Return the workload with the seeds, and so the prompts, of a repetition."""
    return workload.model_copy(update={"seeds": [seed + 1000 * repetition for seed in workload.seeds]})


def measure_points(
    server: Server, workload: Workload, dataset: Path, run: Run, say: Say, repetition_index: int
) -> None:
    """Measure every point of `workload` that the run does not have; the text is examined at the first one only."""
    require_room(server, workload)
    require_trusted_tokenizer(server.facts.tokenizer)
    for number, point in enumerate(workload.points()):
        if run.measured(point, server.name, repetition_index):
            continue
        asked = f"{point.num_prompts} prompts at concurrency {point.concurrency}, seed {point.seed}"
        say(f"{server.name}: {workload.name}: {asked}")
        found = measure(server, point, dataset, run.folder, repetition_index)
        run.add(found)
        if repetition_index == number == 0 and found.usable:
            run.replace(found, examine_text(server, point, run.folder, found))


def require_room(server: Server, workload: Workload) -> None:
    """Raise KimiError if a request of `workload` does not fit into the server's context."""
    needed, room = workload.context_len, server.facts.context_len
    if needed is not None and room is not None and needed > room:
        raise KimiError(
            f"the workload {workload.name!r} needs {needed:,} tokens per request, the server's context has {room:,}",
            where=server.base_url,
            expected=f"a context of at least {needed:,} tokens",
            remedy="start the server with a longer --context-length, or shorten it with --input-len / --output-len",
        )

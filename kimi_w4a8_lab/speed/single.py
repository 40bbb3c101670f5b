"""Measuring of workloads on servers: `bench run` measures one server once, `ab` and `sweep` several in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Literal

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import require
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.data_file import require_trusted_tokenizer
from ..base.server_under_test import Say, Server, Target
from .measure import Measurement, examine_text, measure
from .runs import Run, RunResult, read_run
from .texts import Texts, placed
from .workloads import CHAT_BACKEND, Workload

Kind = Literal["bench", "ab"]
Block = tuple[Target, Sequence[int]]  # a server start and the numbers of its repetitions


def bench(workload: Workload, texts: Texts, target: Target, runs: Path, say: Say, resume: Path | None = None) -> Path:
    """Measure the target once and return the run's folder: see `measured`."""
    return measured("bench", workload.name, [(target, [0])], [workload], texts, runs, say, resume)


def measured(
    kind: Kind, name: str, blocks: Sequence[Block], workloads: Sequence[Workload], texts: Texts, runs: Path, say: Say,
    resume: Path | None,
) -> Path:  # fmt: skip
    """Measure the workloads in blocks and return the run's folder.

    resume: the folder of a run to finish. A server starts only if one of its points is missing. Raises KimiError and
    keeps finished measurements, marked incomplete. What may fail early does so before a folder exists.
    """
    require("sglang")  # its load generator also measures running servers
    sides = {side.name: side for side, _ in blocks}
    content = {workload.name: texts.prepare(workload) for workload in workloads}
    for side in sides.values():
        if side.base_url is not None:
            say(f"{side.name}: asking the server")
            for workload in workloads:
                _check(side.connected, workload)
        side.check()
    run = _resumed(resume, kind, list(sides), workloads) if resume else _begun(runs, kind, name, sides)
    datasets = {name: placed(found, run.folder, name if len(content) > 1 else "") for name, found in content.items()}
    with saved(run, say):
        for number, (side, repetitions) in enumerate(blocks):
            if left(run, side.name, workloads, repetitions):
                log = run.folder / ("server.log" if len(blocks) == 1 else f"server-{number}.log")
                with side.running(log, say) as server:
                    for repetition, workload in product(repetitions, workloads):
                        fresh = seeded(workload, repetition)
                        measure_points(server, fresh, datasets[workload.name], run, say, repetition)
    _require_usable(run)
    return run.folder


def _check(server: Server, workload: Workload) -> None:
    require_room(server, workload)
    if workload.backend != CHAT_BACKEND:
        with EngineClient(server.base_url, server.api_key) as client:
            client.generate("one", 1)  # fails here if /generate is reserved for the operator


def _begun(runs: Path, kind: Kind, name: str, sides: dict[str, Target]) -> Run:
    local = all(target.local for target in sides.values())
    gpus = [device.arch for device in Machine.detect().devices] if local else []
    run = Run.begin(kind, runs, sides, f"{kind}-{name}", hardware={"known": local, "gpus": gpus})
    run.result = RunResult(kind=kind, status="running", sides=list(sides))
    return run


def _resumed(folder: Path, kind: Kind, sides: list[str], workloads: Sequence[Workload]) -> Run:
    """Return the run with its usable measurements. Raises KimiError if it measured something else."""
    run, planned = read_run(folder), {workload.name: workload for workload in workloads}
    other = [
        found.workload.name
        for found in run.usable
        if found.workload.name not in planned
        or seeded(planned[found.workload.name], found.repetition_index) != found.workload
    ]
    if (run.result.kind, run.result.sides) != (kind, sides) or other:
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


def _require_usable(run: Run) -> None:
    """Raise KimiError if a measurement of the finished run has problems."""
    bad: list[Measurement] = [found for found in run.result.measurements if not found.usable]
    if bad:
        raise KimiError(
            f"{len(bad)} of {len(run.result.measurements)} measurements are unusable: {bad[0].problems[0]}",
            where=str(run.folder),
            expected="every request answered at the requested length, by a server without other clients",
            remedy="read the server's log and measure again; reports leave out the marked measurements",
        )

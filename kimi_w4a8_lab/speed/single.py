"""`kimi-w4a8 bench WORKLOAD`: one server, one workload, one run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import move
from tempfile import TemporaryDirectory
from typing import Literal

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import require
from kimi_w4a8_eagle3.base.run_dir import RECORD, new_run_dir, write_json
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.data_file import require_trusted_tokenizer
from ..base.experiment import continuable
from ..base.server_under_test import Say, Server, Target, record_of
from .measure import Measurement, examine_text, measure
from .replay import Replay
from .runs import Run, RunResult, read_run
from .texts import prepare
from .workloads import CHAT_BACKEND, Workload


@dataclass(frozen=True)
class Texts:
    """Sources of the user's text; see `texts.prepare`."""

    sharegpt: str | None = None
    prompts: str | None = None

    def prepare(self, workload: Workload, folder: Path) -> Path:
        return prepare(workload, folder, self.sharegpt, self.prompts)


def bench(
    workload: Workload, texts: Texts | Replay, target: Target, runs: Path, say: Say, resume: Path | None = None
) -> Path:
    """Measure the target and return the run directory. resume: the directory of a run to finish.

    Raises KimiError and keeps finished measurements, marked incomplete.
    """
    require("sglang")  # its load generator also measures running servers
    with prepared(texts, [workload]) as place:
        if target.base_url is not None:
            say(f"{target.name}: asking the server")
        target.check()  # fail before a run directory exists
        if target.base_url is not None:
            require_room(target.connected, workload)
            if workload.backend != CHAT_BACKEND:
                with EngineClient(target.connected.base_url, target.api_key) as client:
                    client.generate("one", 1)  # fails here if /generate is reserved for the operator
        folder = resume or new_run_dir(f"bench-{workload.name}", runs)
        dataset = place(workload, folder)
    with recorded(folder, "bench", {target.name: target}, say, [workload], resume is not None) as run:
        if left(run, target.name, [workload], [0]):
            with target.running(folder / "server.log", say) as server:
                measure_points(server, workload, dataset, run, say)
    require_usable(run)
    return folder


@contextmanager
def prepared(texts: Texts | Replay, workloads: Sequence[Workload]) -> Iterator[Callable[[Workload, Path], Path]]:
    """Prepare the text of all workloads before a server is asked and a run directory exists.

    Yields a function that moves the dataset of a workload into a folder and returns its path there.
    """
    with TemporaryDirectory() as name:
        early, found = Path(name).resolve(), {}
        for number, workload in enumerate(workloads):
            (early / str(number)).mkdir()
            found[workload.name] = texts.prepare(workload, early / str(number))

        def place(workload: Workload, folder: Path) -> Path:
            dataset = found[workload.name]
            return Path(move(dataset, folder.resolve() / dataset.name)) if early in dataset.parents else dataset

        yield place


@contextmanager
def recorded(
    folder: Path,
    kind: Literal["bench", "ab"],
    sides: Mapping[str, Target],
    say: Say,
    workloads: Sequence[Workload] = (),
    resumed: bool = False,
) -> Iterator[Run]:
    """Write the run's record, yield the run, and mark its result complete or incomplete at the end.

    A resumed run keeps its record and its usable measurements. Raises KimiError if it measured something else.
    """
    if resumed:
        run = read_run(folder)
        _require_same(run, kind, list(sides), workloads)
        run.result.status, run.result.reason, run.result.measurements = "running", "", run.usable
    else:
        local = all(target.local for target in sides.values())
        gpus = [device.arch for device in Machine.detect().devices] if local else []
        record = record_of(kind, sides, hardware={"known": local, "gpus": gpus})
        write_json(folder / RECORD, record)
        run = Run(folder, record, RunResult(kind=kind, status="running", sides=list(sides)))
    run.save()
    try:
        with continuable(folder, say):
            yield run
    except BaseException as error:
        run.result.status, run.result.reason = "incomplete", (str(error) or type(error).__name__).splitlines()[0]
        with suppress(KimiError):  # on a full disk this fails too, and the first error says more
            run.save()
        raise
    run.result.status = "complete"
    run.save()


def _require_same(run: Run, kind: str, sides: list[str], workloads: Sequence[Workload]) -> None:
    """Raise KimiError if a run to resume measured something else."""
    planned = {workload.name: workload for workload in workloads}
    other = [
        found.workload.name
        for found in run.usable
        if found.workload.name not in planned
        or seeded(planned[found.workload.name], found.repetition_index) != found.workload
    ]
    if (run.result.kind, run.result.sides) != (kind, sides) or other:
        raise KimiError(
            f"this run measured {f'another {other[0]}' if other else ', '.join(run.result.sides)}",
            where=str(run.folder),
            expected=f"a run of {', '.join(sides)} with the workloads of this command",
            remedy="repeat the command of that run with --resume, or start a new run without it",
        )


def left(run: Run, side: str, workloads: Sequence[Workload], repetitions: Sequence[int]) -> bool:
    """True if a point of these workloads and repetitions was not measured yet."""
    points = [
        (point, number) for number in repetitions for work in workloads for point in seeded(work, number).points()
    ]
    return not all(run.measured(point, side, number) for point, number in points)


def seeded(workload: Workload, repetition: int) -> Workload:
    """Return the workload with the seeds, and so the prompts, of a repetition."""
    return workload.model_copy(update={"seeds": [seed + 1000 * repetition for seed in workload.seeds]})


def measure_points(
    server: Server,
    workload: Workload,
    dataset: Path,
    run: Run,
    say: Say,
    repetition_index: int = 0,
    examine: bool = True,
) -> None:
    """Measure every point of `workload` that the run does not have; the text is examined at the first point only."""
    require_room(server, workload)
    require_trusted_tokenizer(server.facts.tokenizer)
    for number, point in enumerate(workload.points()):
        if run.measured(point, server.name, repetition_index):
            continue
        asked = f"{point.num_prompts} prompts at concurrency {point.concurrency}, seed {point.seed}"
        say(f"{server.name}: {workload.name}: {asked}")
        found = measure(server, point, dataset, run.folder, repetition_index)
        run.add(found)
        if examine and number == 0 and found.usable:
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


def require_usable(run: Run) -> None:
    """Raise KimiError if a measurement of the finished run has problems."""
    bad: list[Measurement] = [found for found in run.result.measurements if not found.usable]
    if bad:
        raise KimiError(
            f"{len(bad)} of {len(run.result.measurements)} measurements are unusable: {bad[0].problems[0]}",
            where=str(run.folder),
            expected="every request answered at the requested length, by a server without other clients",
            remedy="read the server's log and measure again; reports leave out the marked measurements",
        )

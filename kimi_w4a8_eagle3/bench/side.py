"""`kimi-w4a8 bench WORKLOAD`: one server, one workload, one run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import KimiError, UsageError
from ..base.extras import require
from ..base.run_dir import RECORD, new_run_dir, record, write_json
from ..engine.client import EngineClient
from ..engine.process import free_port
from ..fetch.trusted_code import require_trusted_tokenizer
from ..fleet import serve as serving
from ..machine.hardware import Machine
from ..recipe.launch import Launch, Recipe, load_recipe, render
from .measure import Measurement, examine_text, measure
from .runs import RunResult, RunWriter
from .subject import Subject, inspect, is_local, require_room
from .texts import prepare
from .workloads import CHAT_BACKEND, Point, Workload

Say = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """Recipe under the name given by the user: `eagle3-opt`, `tiny:plain`, a TOML file."""

    name: str
    recipe: Recipe

    @classmethod
    def parse(cls, text: str) -> Side:
        return cls(text, load_recipe(text))

    def launch(self, settings: list[str]) -> Launch:
        """Render the launch on a free port of this machine."""
        return render(self.recipe, [f"port={free_port()}", *settings])


@dataclass(frozen=True)
class Texts:
    """Sources of the user's text; see `texts.prepare`."""

    sharegpt: str | None = None
    prompts: str | None = None


def bench(
    workload: Workload,
    texts: Texts,
    runs: Path,
    say: Say,
    *,
    base_url: str | None = None,
    side: Side | None = None,
    settings: list[str] | None = None,
    api_key: str | None = None,
    ops_url: str | None = None,
) -> Path:
    """Measure a running server (`base_url`) or one started from `side`, and return the run directory.

    With both, the server must serve the recipe's model. api_key, ops_url: of the server. Raises KimiError and keeps
    finished measurements, marked incomplete.
    """
    require("sglang")  # its load generator also measures running servers
    launch = side.launch(settings or []) if side else None
    name = side.name if side else "unknown"
    if base_url is not None:
        inspect(base_url, name, launch, api_key, ops_url)  # fail before a run directory exists
        if workload.backend != CHAT_BACKEND:
            with EngineClient(base_url, api_key) as client:  # fails here if /generate is reserved for the operator
                client.generate("one", 1)
    folder = new_run_dir(f"bench-{workload.name}", runs)
    with recorded(folder, "bench", [name], {name: launch} if launch and base_url is None else {}, base_url) as writer:
        dataset = prepare(workload, folder, texts.sharegpt, texts.prompts)
        if base_url is not None:
            subject = inspect(base_url, name, launch, api_key, ops_url)
            measure_points(subject, workload, dataset, writer, say)
        elif side and launch:
            with running(side, launch, folder / "server.log", say, api_key) as subject:
                measure_points(subject, workload, dataset, writer, say)
        else:
            raise UsageError("nothing to measure", where="kimi-w4a8 bench", expected="--base-url URL or --recipe NAME")
    require_usable(writer)
    return folder


@contextmanager
def recorded(
    folder: Path, kind: str, sides: list[str], launches: dict[str, Launch], base_url: str | None
) -> Iterator[RunWriter]:
    """Write the run's record, yield its writer, and mark the result complete or incomplete at the end."""
    gates = {f"{side}: {name}": value for side, launch in launches.items() for name, value in launch.env.items()}
    facts: dict[str, Any] = {"base_url": base_url, "hardware": _hardware(base_url)}
    started = {name: launch.described() for name, launch in launches.items()}
    write_json(folder / RECORD, record(kind, started, gates, **facts))
    writer = RunWriter(folder, RunResult.model_validate({"kind": kind, "status": "running", "sides": sides}))
    writer.save()
    try:
        yield writer
    except BaseException as error:
        with suppress(KimiError):  # on a full disk this fails too, and the first error says more
            writer.close(error)
        if isinstance(error, KimiError):
            kept = len(writer.result.measurements)
            error.remedy = (
                f"{error.remedy + '; ' if error.remedy else ''}{kept} finished measurement(s) are in {folder}"
            )
        raise
    writer.close()


@contextmanager
def running(side: Side, launch: Launch, log: Path, say: Say, api_key: str | None = None) -> Iterator[Subject]:
    """Yield the side's server, checked and ready, and stop it at the end."""
    launch = serving.checked(launch)
    say(f"{side.name}: starting the server (log: {log})")
    with serving.engine(launch, log, side.name) as server:
        seconds = server.wait_ready(serving.READY_TIMEOUT_S)
        say(f"{side.name}: ready after {seconds:.0f} s")
        yield inspect(server.base_url, side.name, api_key=api_key)


def measure_points(
    subject: Subject,
    workload: Workload,
    dataset: Path,
    writer: RunWriter,
    say: Say,
    repetition_index: int = 0,
    examine: bool = True,
) -> None:
    """Measure every point of `workload` once; the text is examined at the first point only."""
    require_room(subject, workload)
    require_trusted_tokenizer(subject.tokenizer)
    for number, point in enumerate(workload.points()):
        say(f"{subject.label}: {_describe(point)}")
        found = measure(subject, point, dataset, writer.folder, repetition_index)
        writer.add(found)
        if examine and number == 0 and found.usable:
            writer.replace(found, examine_text(subject, point, dataset, writer.folder, found))


def require_usable(writer: RunWriter) -> None:
    """Raise KimiError if a measurement of the finished run has problems."""
    bad: list[Measurement] = [found for found in writer.result.measurements if not found.usable]
    if bad:
        raise KimiError(
            f"{len(bad)} of {len(writer.result.measurements)} measurements are unusable: {bad[0].problems[0]}",
            where=str(writer.folder),
            expected="every request answered at the requested length, by a server without other clients",
            remedy="read the server's log and measure again; reports leave out the marked measurements",
        )


def _describe(point: Point) -> str:
    return f"{point.workload.name}: {point.num_prompts} prompts at concurrency {point.concurrency}, seed {point.seed}"


def _hardware(base_url: str | None) -> dict[str, Any]:
    """Return the architectures of this machine's GPUs if the server runs here."""
    local = base_url is None or is_local(base_url)
    return {"known": local, "gpus": [device.arch for device in Machine.detect().devices] if local else []}

"""`kimi-w4a8 bench WORKLOAD`: one server, one workload, one run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import KimiError
from ..base.extras import require
from ..base.run_dir import RECORD, new_run_dir, write_json
from ..engine.client import EngineClient
from ..fetch.trusted_code import require_trusted_tokenizer
from ..fleet.target import Say, Server, Target, record_of
from ..machine.hardware import Machine
from .measure import Measurement, examine_text, measure
from .runs import RunResult, RunWriter
from .texts import prepare
from .workloads import CHAT_BACKEND, Workload


@dataclass(frozen=True)
class Texts:
    """Sources of the user's text; see `texts.prepare`."""

    sharegpt: str | None = None
    prompts: str | None = None


def bench(workload: Workload, texts: Texts, target: Target, runs: Path, say: Say) -> Path:
    """Measure the target and return the run directory.

    Raises KimiError and keeps finished measurements, marked incomplete.
    """
    require("sglang")  # its load generator also measures running servers
    target.check()  # fail before a run directory exists
    if target.base_url is not None:
        require_room(target.connected, workload)
        if workload.backend != CHAT_BACKEND:
            with EngineClient(target.connected.base_url, target.api_key) as client:
                client.generate("one", 1)  # fails here if /generate is reserved for the operator
    folder = new_run_dir(f"bench-{workload.name}", runs)
    with recorded(folder, "bench", {target.name: target}) as writer:
        dataset = prepare(workload, folder, texts.sharegpt, texts.prompts)
        with target.running(folder / "server.log", say) as server:
            measure_points(server, workload, dataset, writer, say)
    require_usable(writer)
    return folder


@contextmanager
def recorded(folder: Path, kind: str, sides: Mapping[str, Target]) -> Iterator[RunWriter]:
    """Write the run's record, yield its writer, and mark the result complete or incomplete at the end."""
    local = all(target.local for target in sides.values())
    gpus = [device.arch for device in Machine.detect().devices] if local else []
    write_json(folder / RECORD, record_of(kind, sides, hardware={"known": local, "gpus": gpus}))
    writer = RunWriter(folder, RunResult.model_validate({"kind": kind, "status": "running", "sides": list(sides)}))
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


def measure_points(
    server: Server,
    workload: Workload,
    dataset: Path,
    writer: RunWriter,
    say: Say,
    repetition_index: int = 0,
    examine: bool = True,
) -> None:
    """Measure every point of `workload` once; the text is examined at the first point only."""
    require_room(server, workload)
    require_trusted_tokenizer(server.facts.tokenizer)
    for number, point in enumerate(workload.points()):
        asked = f"{point.num_prompts} prompts at concurrency {point.concurrency}, seed {point.seed}"
        say(f"{server.name}: {workload.name}: {asked}")
        found = measure(server, point, dataset, writer.folder, repetition_index)
        writer.add(found)
        if examine and number == 0 and found.usable:
            writer.replace(found, examine_text(server, point, writer.folder, found))


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

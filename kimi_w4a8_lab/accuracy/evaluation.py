"""Start of an evaluation: its server, its folder with run.json, and the recorder that keeps the answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json

from ..base.experiment import continuable, read_plan
from ..base.server_under_test import Server, Target, record_of
from .recorder import REQUESTS, Patience, Recorder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of an evaluation that neither change its requests nor name the server.

    baseline: run to compare with, and margin: the accepted loss. published: name of the reported figures that decide.
    resume: run to finish, whose answers are kept. data_dir: files of GSM8K.
    """

    baseline: Path | None = None
    margin: float = 0.01
    published: str | None = None
    max_unusable: float = 0.01
    resume: Path | None = None
    runs: Path = DEFAULT_ROOT
    data_dir: Path | None = None
    patience: Patience = field(default_factory=Patience)


class Evaluation(NamedTuple):
    folder: Path
    server: Server
    recorder: Recorder


@contextmanager
def evaluated(
    target: Target, kind: str, options: RunOptions, console: Console, plan: DataclassInstance | None = None,
    name: str = "", **facts: object,
) -> Iterator[Evaluation]:  # fmt: skip
    """Yield the running server with the run's folder and recorder.

    plan: recorded in run.json; a run with a plan can be resumed, and a failure or a signal names the option for it.
    """
    target.check()
    folder = options.resume or new_run_dir(name or kind, options.runs)
    with ExitStack() as stack:
        server = stack.enter_context(target.running(folder / "server.log", console.print))
        if plan is not None:
            facts["plan"] = asdict(plan)
            stack.enter_context(continuable(folder, console.print))
        if options.resume is None:
            write_json(folder / RECORD, record_of(kind, {"server": target}, model=server.model, **facts))
        recorder = Recorder(server.base_url, folder / REQUESTS, options.patience, server.api_key)
        try:
            yield Evaluation(folder, server, recorder)
        except KimiError:
            new = options.resume is None and not recorder.finished
            if new and {path.name for path in folder.iterdir()} <= {RECORD, REQUESTS}:
                shutil.rmtree(folder)  # nothing was answered or logged
            raise


def require_same_plan(baseline: Path, plan: DataclassInstance, names: Sequence[str]) -> None:
    """Raise KimiError if the baseline has another value for one of these settings: only equal runs are compared."""
    theirs = read_plan(baseline, type(plan))
    for name in names:
        if (ours := getattr(plan, name)) != (other := getattr(theirs, name)):
            what = f"the baseline has {name} {other}, this run has {ours}"
            raise KimiError(what, "--baseline", "the same task and settings in both runs")

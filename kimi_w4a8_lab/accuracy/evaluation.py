"""Start of an evaluation: its server, its folder with run.json, and the recorder that keeps the answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD

from ..base.request_progress import request_progress
from ..base.run_folder import RunFolder
from ..base.server_under_test import Server, Target
from .recorder import REQUESTS, Answer, JsonBody, Patience, Recorder
from .results import Conclusion, EvalResult

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


@dataclass(frozen=True)
class Evaluation:
    """Running evaluation: its folder, the server, and the recorder that keeps the answers."""

    run: RunFolder[EvalResult]
    server: Server
    recorder: Recorder

    def ask(self, title: str, endpoint: str, bodies: Sequence[JsonBody], level: int, console: Console) -> list[Answer]:
        """Return one answer for each body, asked at concurrency `level` with a progress bar."""
        with request_progress(title, len(bodies), console) as shown:
            return self.recorder.ask(endpoint, bodies, level, shown)

    def finish(self, kind: type[EvalResult], verdict: Conclusion, **facts: Any) -> Path:
        """Write result.json and return the folder."""
        facts |= {"configuration": self.server.name, "model": self.server.model, "requests": self.recorder.counts}
        self.run.save(kind(verdict=verdict, **facts))
        return self.run.folder


@contextmanager
def evaluated(
    target: Target, kind: str, options: RunOptions, console: Console, plan: DataclassInstance | None = None,
    name: str = "", **facts: object,
) -> Iterator[Evaluation]:  # fmt: skip
    """Yield the evaluation of a running server.

    plan: recorded in run.json; a run with a plan can be resumed, and a failure or a signal names the option for it.
    """
    target.check()
    if plan is not None:
        facts["plan"] = asdict(plan)
    begin = partial(RunFolder[EvalResult].begin, kind, options.runs, {"server": target}, name)
    run = RunFolder[EvalResult].resume(options.resume) if options.resume else begin(**facts)
    with ExitStack() as stack:
        server = stack.enter_context(target.running(run.folder / "server.log", console.print))
        if plan is not None:
            stack.enter_context(run.continuable(console.print))
        if options.resume is None:
            run.note(model=server.model)
        recorder = Recorder(server.base_url, run.folder / REQUESTS, options.patience, server.api_key)
        console.print(f"{server.model} at {server.base_url}; {run.folder}", soft_wrap=True)
        try:
            yield Evaluation(run, server, recorder)
        except KimiError:
            new = options.resume is None and not recorder.answers and not recorder.reused
            if new and {path.name for path in run.folder.iterdir()} <= {RECORD, REQUESTS}:
                shutil.rmtree(run.folder)  # nothing was answered or logged
            raise


def require_same_plan(baseline: Path, plan: DataclassInstance, names: Sequence[str]) -> None:
    """Raise KimiError if the baseline has another value for one of these settings: only equal runs are compared."""
    theirs = RunFolder[object].resume(baseline).plan(type(plan))
    for name in names:
        if (ours := getattr(plan, name)) != (other := getattr(theirs, name)):
            what = f"the baseline has {name} {other}, this run has {ours}"
            raise KimiError(what, "--baseline", "the same task and settings in both runs")

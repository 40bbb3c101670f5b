"""Start of an evaluation: its server, its folder with run.json, and the recorder that keeps the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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

    baseline: run to compare with. published: name of the reported figures that decide.
    """

    baseline: Path | None = None
    published: str | None = None
    max_unusable: float = 0.01
    runs: Path = DEFAULT_ROOT
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Evaluation:
    folder: Path
    server: Server
    recorder: Recorder


@contextmanager
def evaluated(
    target: Target, kind: str, options: RunOptions, console: Console, plan: DataclassInstance | None = None,
    resume: Path | None = None, name: str = "", **facts: object,
) -> Iterator[Evaluation]:  # fmt: skip
    """Yield the running server with the run's folder and recorder.

    plan: recorded in run.json; a run with a plan can be resumed, and a failure or a signal names the option for it.
    """
    target.check()
    folder = resume or new_run_dir(name or kind, options.runs)
    with ExitStack() as stack:
        server = stack.enter_context(target.running(folder / "server.log", console.print))
        if plan is not None:
            facts["plan"] = asdict(plan)
            stack.enter_context(continuable(folder, console.print))
        if resume is None:
            write_json(folder / RECORD, record_of(kind, {"server": target}, model=server.model, **facts))
        yield Evaluation(folder, server, Recorder(server.base_url, folder / REQUESTS, options.patience, server.api_key))


def require_same_plan(baseline: Path, plan: DataclassInstance, names: Sequence[str]) -> None:
    """Raise KimiError if the baseline has another value for one of these settings: only equal runs are compared."""
    theirs = read_plan(baseline, type(plan))
    for name in names:
        if (ours := getattr(plan, name)) != (other := getattr(theirs, name)):
            what = f"the baseline has {name} {other}, this run has {ours}"
            raise KimiError(what, "--baseline", "the same task and settings in both runs")

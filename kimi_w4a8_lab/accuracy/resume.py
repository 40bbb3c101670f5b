"""Record of an evaluation: run.json at the start, answers as they come, result.json at the end, and how it resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from kimi_w4a8_eagle3.base.signals import Terminated

from ..base.server_under_test import Server, Target, record_of
from .judge import Conclusion
from .recorder import REQUESTS, Patience, Recorder

RESULT = "result.json"


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
    kind: str
    folder: Path
    server: Server
    recorder: Recorder

    def write_result(self, task: str, verdict: Conclusion, **facts: object) -> Path:
        """Write result.json and return the run's folder."""
        reused = len(self.recorder.reused)
        asked = {"asked": self.recorder.finished - reused, "reused": reused, "retries": self.recorder.retries}
        about = {"kind": self.kind, "task": task, "configuration": self.server.name, "model": self.server.model}
        write_json(self.folder / RESULT, {**about, "requests": asked, "verdict": asdict(verdict), **facts})
        return self.folder


@contextmanager
def evaluated(
    target: Target, kind: str, name: str, facts: Mapping[str, Any], options: RunOptions, console: Console,
    resume: Path | None = None,
) -> Iterator[Evaluation]:  # fmt: skip
    """Yield the running server with the run's folder and recorder.

    facts: recorded in run.json; a run with facts can be resumed, and a failure or a signal names the option for it.
    """
    target.check()
    folder = resume or new_run_dir(name, options.runs)
    with target.running(folder / "server.log", console.print) as server:
        if resume is None:
            write_json(folder / RECORD, record_of(kind, {"server": target}, model=server.model, **facts))
        try:
            recorder = Recorder(server.base_url, folder / REQUESTS, options.patience, server.api_key)
            yield Evaluation(kind, folder, server, recorder)
        except (KimiError, Terminated) as error:
            kept = f"the answers are kept; continue with --resume {folder}" if facts else ""
            if isinstance(error, KimiError):
                error.remedy = "; ".join(filter(None, (error.remedy, kept)))
            elif kept:
                console.print(f"kimi-w4a8: {kept}")
            raise


def load_run(folder: Path, read: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Load the run.json of a run; raise KimiError if `read` cannot read it."""
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        read(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"not a run that can be used here: {type(error).__name__}: {error}"
        raise KimiError(what, str(path), "a run directory of the same `kimi-w4a8` command") from error
    return found

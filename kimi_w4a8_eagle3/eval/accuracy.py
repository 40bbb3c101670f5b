"""Accuracy runs (`eval gsm8k`, `eval tiny-math`): ask a server, score the answers, write the verdict."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base import laptop
from ..base.console import request_progress
from ..base.errors import KimiError, UsageError
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from ..fleet.target import Server, Target, record_of
from . import tasks
from .earlier_run import load_run, require_same_protocol, resumable, write_result
from .harness import Protocol, command, run_lm_eval
from .judge import Reference, judge, load_references
from .outcomes import PROBLEMS, load_outcomes, newest, read_outcomes, write_rows
from .recorder import REQUESTS, Patience, Recorder

KIND = "eval-accuracy"


@dataclass(frozen=True)
class AccuracyOptions:
    """Settings of an accuracy run that do not name the server or the protocol."""

    data_dir: Path | None = None
    baseline: Path | None = None
    published: str | None = None
    margin: float = 0.01
    max_unusable: float = 0.01
    runs: Path = DEFAULT_ROOT
    patience: Patience = field(default_factory=Patience)


def run(
    target: Target, protocol: Protocol, options: AccuracyOptions, console: Console, resume: Path | None = None
) -> Path:
    """Run one accuracy evaluation and return its run directory, whose result.json holds the verdict.

    Raises KimiError when the run cannot finish. Its answers are kept for `resume`.
    """
    count = protocol.task.counts.get("test")
    if protocol.limit and count and protocol.limit > count:
        raise UsageError(f"{protocol.limit} problems were asked for", "--limit", f"at most {count}")
    baseline = load_run(options.baseline) if options.baseline else None
    if baseline is not None:
        require_same_protocol(baseline, protocol)
    files = tasks.check_data(options.data_dir) if options.data_dir and protocol.task is tasks.GSM8K else None
    target.check()
    folder = resume or new_run_dir(f"eval-{protocol.task.title.lower()}", options.runs)
    if protocol.task is tasks.TINY_MATH:
        files = {"test": folder / "problems-asked.jsonl"}
        tasks.write_tiny_problems(files["test"], protocol.limit or 0)
    tasks.write_task(protocol.task, folder / "task", files)

    with target.running(folder / "server.log", console.print) as server:
        if resume is None:
            facts = {"protocol": describe(protocol), "data_dir": options.data_dir and str(options.data_dir.resolve())}
            write_json(folder / RECORD, record_of(KIND, {"server": target}, model=server.model, **facts))
        console.print(f"{protocol.task.title}: {_describe(protocol)} on {server.model} at {server.base_url}; {folder}")
        with resumable(folder, console):
            recorder = _ask(server, protocol, folder, options.patience, console, offline=files is not None)
    return _conclude(target, server, protocol, options, folder, recorder)


def _ask(
    server: Server, protocol: Protocol, folder: Path, patience: Patience, console: Console, offline: bool
) -> Recorder:
    output = folder / "lm_eval"
    shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run; its answers are in requests.jsonl
    with (
        Recorder(server.base_url, folder / REQUESTS, patience, server.api_key) as recorder,
        request_progress(protocol.task.title, protocol.limit or protocol.task.counts.get("test"), console) as shown,
    ):
        words = command(protocol, server.model, recorder.base_url, folder / "task", output)
        run_lm_eval(words, recorder, folder / "lm_eval.log", offline, lambda: shown(recorder.finished, recorder.note))
    return recorder


def _conclude(
    target: Target, server: Server, protocol: Protocol, options: AccuracyOptions, folder: Path, recorder: Recorder
) -> Path:
    outcomes = read_outcomes(folder / "lm_eval", folder / REQUESTS, protocol.chat)
    expected = protocol.limit or protocol.task.counts.get("test", len(outcomes))
    if len(outcomes) != expected:
        raise KimiError(f"lm-eval scored {len(outcomes)} problems instead of {expected}", where=str(folder))
    write_rows(folder / PROBLEMS, outcomes)
    references, judged = references_for(protocol, options, target)
    baseline = load_outcomes(options.baseline) if options.baseline else None
    verdict = judge(outcomes, references, judged, baseline, options.margin, options.max_unusable)
    facts = {"protocol": describe(protocol), "baseline": options.baseline, "judged_against": judged}
    facts["lm_eval"] = newest(folder / "lm_eval", "*/results_*.json").relative_to(folder)
    return write_result(folder, KIND, protocol.task.title, server, recorder, verdict, **facts)


def references_for(protocol: Protocol, options: AccuracyOptions, target: Target) -> tuple[list[Reference], str | None]:
    """Return the published accuracies, and the configuration among them that decides the verdict (None: none does)."""
    if protocol.task is tasks.TINY_MATH:
        found = _recorded_tiny()
        return found, found[0].configuration if found else None
    references = load_references()
    names = {reference.configuration for reference in references}
    if options.published is not None and options.published not in names:
        raise UsageError(f"no published accuracy of {options.published!r}", "--published", ", ".join(sorted(names)))
    comparable = protocol.shots == tasks.GSM8K.shots and not protocol.chat
    recipe = target.launch.name if target.launch else None
    if recipe is not None and recipe not in names and options.published is None:
        return [], None  # another model, so these accuracies do not apply
    judged = options.published or (recipe if recipe in names and comparable else None)
    return references, judged


def describe(protocol: Protocol) -> dict[str, Any]:
    """Return the protocol as JSON. Runs that are compared must share it, except for the concurrency."""
    return {**asdict(protocol), "task": protocol.task.name}


def _recorded_tiny() -> list[Reference]:
    """Return the built-in model's recorded accuracies, or an empty list when none were recorded."""
    try:
        recorded = json.loads(laptop.require("metrics", "eval tiny-math").read_text())["evaluation"]
        accuracy, n = float(recorded["forms"]["think"]["right_w4a8"]), int(recorded["held_out_problems"])
    except (KimiError, OSError, ValueError, KeyError, TypeError):
        return []
    return [
        Reference("recorded", metric, accuracy, n, "metrics.json of the built-in model") for metric in tasks.METRICS
    ]


def _describe(protocol: Protocol) -> str:
    size = f"first {protocol.limit} problems" if protocol.limit else "all problems"
    return f"{size}, {protocol.shots}-shot, {'chat' if protocol.chat else 'completions'}"

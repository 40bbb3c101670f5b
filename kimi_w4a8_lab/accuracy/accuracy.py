"""Accuracy runs (`eval gsm8k`, `eval tiny-math`): ask a server, score the answers, write the verdict."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.installed import require_laptop

from ..base.request_progress import request_progress
from ..base.run_folder import RunFolder
from ..base.server_under_test import Target
from .evaluation import RunOptions, evaluated, require_same_plan
from .harness import score
from .judge import judge, load_references
from .problems import problems
from .results import AccuracyResult, ProblemOutcome, Reference
from .tasks import GSM8K, METRICS, TINY_MATH, Protocol, read_problems


def run(target: Target, protocol: Protocol, options: RunOptions, console: Console) -> Path:
    """Run one accuracy evaluation and return its run directory, whose result.json holds the verdict.

    Raises KimiError when the run cannot finish. Its answers are kept for `options.resume`.
    """
    task, count = protocol.task, protocol.task.counts.get("test")
    if protocol.limit and count and protocol.limit > count:
        raise UsageError(f"{protocol.limit} problems were asked for", "--limit", f"at most {count}")
    if options.baseline:
        require_same_plan(options.baseline, protocol, ("task", "chat", "shots", "seed"))
    baseline = load_outcomes(options.baseline) if options.baseline else None
    data = read_problems(options.data_dir) if options.data_dir and task == GSM8K else None
    if task == TINY_MATH:
        data = {"test": [{"question": p.question, "answer": p.solution} for p in problems(protocol.limit or 0)]}
    references, judged = references_for(protocol, options, target)
    name, data_dir = f"eval-{task.title.lower()}", options.data_dir and options.data_dir.resolve()
    begun = evaluated(target, AccuracyResult.kind, options, console, protocol, name, data_dir=data_dir)
    with begun as evaluation:
        with request_progress(task.title, protocol.count, console) as shown:
            log = evaluation.run.folder / "lm_eval.log"
            outcomes, figures = score(protocol, evaluation.server.model, evaluation.recorder, data, log, shown)
        expected = protocol.count or len(outcomes)
        if len(outcomes) != expected:
            raise KimiError(f"lm-eval scored {len(outcomes)} problems instead of {expected}", where=str(log))
        verdict = judge(outcomes, references, judged, baseline, options.margin, options.max_unusable)
        facts = {"baseline": options.baseline, "judged_against": judged, "task": task.title}
        return evaluation.finish(AccuracyResult, verdict, **facts, lm_eval=figures, outcomes=outcomes)


def load_outcomes(folder: Path) -> list[ProblemOutcome]:
    """Load the problems of a finished run; raise KimiError for any other folder."""
    return RunFolder[AccuracyResult].open(folder, AccuracyResult).result.outcomes


def references_for(protocol: Protocol, options: RunOptions, target: Target) -> tuple[list[Reference], str | None]:
    """Return the published accuracies, and the configuration among them that decides the verdict (None: none does)."""
    if protocol.task == TINY_MATH:
        found = _recorded_tiny()
        return found, found[0].configuration if found else None
    references = load_references()
    names = {reference.configuration for reference in references}
    if options.published is not None and options.published not in names:
        raise UsageError(f"no published accuracy of {options.published!r}", "--published", ", ".join(sorted(names)))
    comparable = protocol.shots == GSM8K.shots and not protocol.chat
    recipe = target.launch.name if target.launch else None
    if recipe is not None and recipe not in names and options.published is None:
        return [], None  # another model, so these accuracies do not apply
    judged = options.published or (recipe if recipe in names and comparable else None)
    return references, judged


def _recorded_tiny() -> list[Reference]:
    """Return the built-in model's recorded accuracies, or an empty list when none were recorded."""
    try:
        recorded = json.loads(require_laptop("metrics", "eval tiny-math").read_text())["evaluation"]
        accuracy, n = float(recorded["forms"]["think"]["right_w4a8"]), int(recorded["held_out_problems"])
    except (KimiError, OSError, ValueError, KeyError, TypeError):
        return []
    return [Reference("recorded", metric, accuracy, n, "metrics.json of the built-in model") for metric in METRICS]

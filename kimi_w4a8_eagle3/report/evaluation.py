"""Content of an evaluation's page: verdict with its reasons, accuracies beside reported ones, checks, differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from ..base.run_dir import RECORD
from ..base.verdict import Verdict
from ..bench.statistics import Interval
from ..eval import significance
from .page import Page, Picture, Section, Table, Tone, Words

TITLES = {
    "eval-accuracy": "Accuracy",
    "eval-lossless": "Is speculation lossless?",
    "eval-smoke": "Smoke test",
    "eval-tools": "Tool calls",
}
TONES: dict[Verdict | None, Tone] = {Verdict.PASS: "better", Verdict.FAIL: "worse", Verdict.INVALID: "worse"}
Result = Mapping[str, Any]


def is_evaluation(folder: Path) -> bool:
    """True if a run directory holds a finished evaluation."""
    try:
        return json.loads((folder / "result.json").read_text()).get("kind") in TITLES
    except (OSError, ValueError, AttributeError):
        return False


def page(folder: Path) -> Page:
    """Return the page of a finished evaluation. Raises KimiError for any other folder."""
    if not is_evaluation(folder):
        raise KimiError(
            "not a finished evaluation", str(folder), "a run directory of `kimi-w4a8 eval` with result.json"
        )
    result = json.loads((folder / "result.json").read_text())
    kind, judged = result["kind"], result.get("verdict") or result.get("report") or result
    state = Verdict(judged["state"])
    title = f"Accuracy: {result['task']}" if kind == "eval-accuracy" else TITLES[kind]
    reasons = judged.get("reasons") or [f"{c['name']}: {c['found']} ({c['wanted']})" for c in result.get("checks", ())]
    rule = f"PASS means: {found}." if (found := _rule(result)) else ""
    about = " ".join(filter(None, (f"{folder.resolve().name}.", rule, _versions(folder))))
    words = [Words(reason, TONES.get(state, "")) for reason in reasons]
    head = f"{state.headline}: {title}, {result['configuration']}"
    return Page(head, words, about, _chart(result, judged), sections=list(_sections(result, judged)))


def _sections(result: Result, judged: Result) -> Iterator[Section]:
    rows = [_accuracy(found) for found in judged.get("accuracies", ())]
    rows += [_reported(found) for found in judged.get("references", ())]
    yield Section("Measured and published", tables=[Table(_ACCURACIES, rows)])
    rows = [
        [check["name"], Words(check["found"], "better" if check["passed"] else "worse"), check["wanted"]]
        for check in result.get("checks", ())
    ]
    yield Section("Checks", tables=[Table(("check", "found", "wanted"), rows)])
    rows = []
    for pair in judged.get("paired", ()):
        counts = [str(pair[name]) for name in ("both", "only_new", "only_base", "neither")]
        tail = [_points(pair["difference"]), f"{pair['mcnemar_p']:.3g}", f"{pair['power']:.0%}"]
        rows.append([pair["metric"], *counts, *tail])
    yield Section("Against the baseline, problem by problem", tables=[Table(_PAIRED, rows)])
    rows = [
        [Words(problem["problem"]), Words(json.dumps(problem["calls"], ensure_ascii=False), literal=True)]
        for problem in result.get("invalid", ())
    ]
    yield Section("Calls that do not fit their schema", tables=[Table(("what is wrong", "the calls"), rows)])
    rows = []
    for found in judged.get("differing", ()):
        solved = "; ".join(f"{metric}: {side}" for metric, side in found["solved_by"].items())
        texts = (Words(found[name], literal=True) for name in ("new", "base"))
        rows.append([str(found["id"]), found["question"], str(found["target"]), solved, *texts])
    yield Section("Problems that only one configuration solves", tables=[Table(_DIFFERING, rows)])
    rows = [_divergence(found) for found in judged.get("divergences", ())]
    yield Section("First differences of greedy answers", tables=[Table(_DIVERGENCES, rows)])


def _accuracy(found: Result) -> list[str | Words]:
    inside = found["interval"]
    shown = f"{inside['value']:.2%} [{inside['low']:.2%}, {inside['high']:.2%}]" if inside else ""
    return ["this run", found["metric"], f"{found['correct']} of {found['answered']}", shown, "", ""]


def _reported(found: Result) -> list[str | Words]:
    reference = found["reference"]
    inside = _wilson(reference)
    shown = f"{reference['accuracy']:.2%} [{inside.low:.2%}, {inside.high:.2%}]"
    cells = [reference["configuration"], reference["metric"], f"of {reference['n']}", shown]
    return [*cells, _points(found["difference"]), Words(reference["source"], "soft")]


def _divergence(found: Result) -> list[str | Words]:
    best = ", ".join(f"{token}: {logprob:.4f}" for logprob, token in found["top2"])
    gap = "not among the best candidates" if found["gap"] is None else f"{found['gap']:.4f}"
    where = [str(found[name]) for name in ("prompt", "kind", "concurrency", "position")]
    judgement = Words(found["judgement"], "worse" if found["judgement"] == "bug" else "")
    return [*where, f"{found['token']} for {found['reference_token']}", best, gap, judgement]


def _chart(result: Result, judged: Result) -> Picture | None:
    """Draw the accuracies beside the reported ones; None without any, or without matplotlib."""
    if find_spec("matplotlib") is None or not any(found["interval"] for found in judged.get("accuracies", ())):
        return None
    from .plots import Bar, panel  # optional: matplotlib

    bars = []
    for found in judged["accuracies"]:
        if inside := found["interval"]:
            shown = Interval(*(100 * inside[name] for name in ("value", "low", "high")))
            bars.append(Bar(found["metric"], result["configuration"], False, shown))
    for found in (reference["reference"] for reference in judged.get("references", ())):
        inside = _wilson(found)
        shown = Interval(100 * found["accuracy"], 100 * inside.low, 100 * inside.high)
        bars.append(Bar(found["metric"], found["configuration"], True, shown))
    return panel("accuracy", "share solved (%)", bars)


def _wilson(reference: Result) -> significance.ShareInterval:
    return significance.wilson(round(reference["accuracy"] * reference["n"]), reference["n"])


def _points(found: Result) -> str:
    return "{:+.2f} [{:+.2f}, {:+.2f}] points".format(*(100 * found[name] for name in ("value", "low", "high")))


def _rule(result: Result) -> str:
    """Return the meaning of PASS in a sentence; empty when nothing was compared."""
    kind = result["kind"]
    if kind == "eval-lossless":
        if "prefill" not in result["report"]:  # --exact
            return "tokens and logprobs are equal bit for bit, with no rule for ties"
        return "every token is the argmax of its own logits, and a prefill confirms it as well as without speculation"
    if kind == "eval-smoke":
        return "every check holds"
    if kind == "eval-tools":
        return "every judged check holds, and tools are called as in the vendor's answers or the baseline"
    margins = {f"{pair['margin'] * 100:g}" for pair in result["verdict"]["paired"]}
    if margins:
        return f"not worse: the 90% interval of the difference to the baseline lies above -{', '.join(margins)} points"
    if result["judged_against"]:
        margin = significance.REPORTED_MARGIN * 100
        return f"the 90% interval of the difference to what was reported lies above -{margin:g} points"
    return ""


def _versions(folder: Path) -> str:
    """Return time, packages and commit of the run's record; empty without a record."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return ""
    packages = [f"{name} {version}" for name, version in record["versions"].items()]
    commit = [f"commit {record['git_commit'][:12]}"] if record["git_commit"] else []
    return ", ".join([record["started"], *packages, *commit])


_ACCURACIES = ("configuration", "metric", "solved", "accuracy [95%]", "this run minus it [90%]", "source")
_PAIRED = (
    "metric",
    "both solve",
    "only this run",
    "only the baseline",
    "neither",
    "difference [90%]",
    "McNemar p",
    "power",
)
_DIFFERING = ("problem", "question", "answer", "solved by", "this run", "baseline")
_DIVERGENCES = (
    "prompt",
    "kind",
    "concurrency",
    "position",
    "tokens",
    "reference's top 2 (logprob)",
    "gap",
    "judgement",
)

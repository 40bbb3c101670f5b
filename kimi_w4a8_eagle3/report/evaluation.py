"""Content of an evaluation's page: verdict with its reasons, accuracies beside reported ones, checks, differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from ..base.run_dir import RECORD
from ..base.verdict import Verdict
from ..bench.statistics import Interval
from ..eval import significance
from ..eval.greedy_match import Divergence
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


def verdict(folder: Path) -> Verdict:
    """Return the verdict of a finished evaluation."""
    return Verdict(_judged(_read(folder))["state"])


def page(folder: Path) -> Page:
    """Return the page of a finished evaluation. Raises KimiError for any other folder."""
    result = _read(folder)
    judged, state = _judged(result), verdict(folder)
    title = f"Accuracy: {result['task']}" if result["kind"] == "eval-accuracy" else TITLES[result["kind"]]
    rule = f"PASS means: {found}." if (found := _rule(result, judged)) else ""
    about = " ".join(filter(None, (f"{folder.resolve().name}.", rule, _versions(folder))))
    words = [Words(reason, TONES.get(state, "")) for reason in judged["reasons"]]
    head = f"{state.headline}: {title}, {result['configuration']}"
    return Page(head, words, about, _chart(result, judged), sections=list(_sections(result, judged)))


def _read(folder: Path) -> Result:
    if not is_evaluation(folder):
        raise KimiError(
            "not a finished evaluation", str(folder), "a run directory of `kimi-w4a8 eval` with result.json"
        )
    found: Result = json.loads((folder / "result.json").read_text())
    return found


def _judged(result: Result) -> Result:
    """Return the conclusion, which earlier versions and `--exact` call the report."""
    found: Result = result.get("verdict") or result.get("report") or {"reasons": [], **result}
    return found


def _sections(result: Result, judged: Result) -> Iterator[Section]:
    rows = [row for found in judged.get("accuracies", ()) for row in _accuracy(found, judged)]
    yield Section("Measured and published", tables=[Table(_ACCURACIES, rows)])
    counts = {name.replace("_", " "): judged[name] for name in _COUNTS if name in judged} | result.get("requests", {})
    counts |= {f"ended with {name}": count for name, count in result.get("finish_reasons", {}).items()}
    yield Section("Requests", tables=[Table(list(counts), [list(map(str, counts.values()))] if counts else [])])
    checks: list[list[str | Words]] = [
        [check["name"], Words(check["found"], "better" if check["passed"] else "worse"), check["wanted"]]
        for check in result.get("checks", ())
    ]
    yield Section("Checks", tables=[Table(("check", "found", "wanted"), checks)])
    rows = []
    for pair in judged.get("paired", ()):
        counts = [str(pair[name]) for name in ("both", "only_new", "only_base", "neither")]
        tail = [_interval(pair["difference"], "+"), f"{pair['mcnemar_p']:.3g}", f"{pair['power']:.0%}"]
        rows.append([pair["metric"], *counts, *tail])
    yield Section("Against the baseline, problem by problem", tables=[Table(_PAIRED, rows)])
    rows = [
        [Words(call["problem"]), Words(json.dumps(call["calls"], ensure_ascii=False), literal=True)]
        for call in result.get("invalid", ())
    ]
    yield Section(
        "Calls that do not fit their schema", tables=[Table(("what is wrong", "the calls"), rows)], closed=True
    )
    rows = []
    for found in judged.get("differing", ()):
        solved = "; ".join(f"{metric}: {side}" for metric, side in found["solved_by"].items())
        texts = (Words(found[name], literal=True) for name in ("new", "base"))
        rows.append([str(found["id"]), found["question"], str(found["target"]), solved, *texts])
    title = "Problems that only one configuration solves"
    yield Section(title, tables=[Table(_DIFFERING, rows)], closed=True)
    parted = "\n".join(str(Divergence(**found)) for found in judged.get("divergences", ()))
    yield Section("First differences of greedy answers", listings=[("all of them", parted)] if parted else ())


def _accuracy(found: Result, judged: Result) -> Iterator[list[str | Words]]:
    """Yield a row of one metric for each reported accuracy, or one row without any."""
    inside = found["interval"]
    ours = [found["metric"], f"{found['correct']} of {found['answered']}", _interval(inside) if inside else ""]
    compared = [each for each in judged.get("references", ()) if each["reference"]["metric"] == found["metric"]]
    for each in compared:
        reference = each["reference"]
        theirs = f"{_interval(_wilson(reference))} of {reference['n']}"
        yield [
            *ours,
            theirs,
            reference["configuration"],
            _interval(each["difference"], "+"),
            Words(reference["source"], "soft"),
        ]
    if not compared:
        yield [*ours, "", "", "", ""]


def _chart(result: Result, judged: Result) -> Picture | None:
    """Draw the accuracies beside the reported ones; None without any, or without matplotlib."""
    if find_spec("matplotlib") is None or not any(found["interval"] for found in judged.get("accuracies", ())):
        return None
    from .plots import Bar, panel  # optional: matplotlib

    measured = [(found["metric"], result["configuration"], False, found["interval"]) for found in judged["accuracies"]]
    reported = [found["reference"] for found in judged.get("references", ())]
    shares = measured + [(found["metric"], found["configuration"], True, _wilson(found)) for found in reported]
    bars = [
        Bar(metric, side, published, Interval(*(100 * share[name] for name in ("value", "low", "high"))))
        for metric, side, published, share in shares
        if share
    ]
    return panel("accuracy", "share solved (%)", bars)


def _wilson(reference: Result) -> Result:
    return asdict(significance.wilson(round(reference["accuracy"] * reference["n"]), reference["n"]))


def _interval(found: Result, sign: str = "") -> str:
    return format(significance.ShareInterval(**found), sign)


def _rule(result: Result, judged: Result) -> str:
    """Return the meaning of PASS in a sentence; empty when nothing was compared."""
    if result["kind"] == "eval-lossless" and "prefill" not in judged:  # --exact
        return "tokens and logprobs are equal bit for bit, with no rule for ties"
    if result["kind"] in _RULES:
        return _RULES[result["kind"]]
    margins = {f"{pair['margin'] * 100:g}" for pair in judged["paired"]}
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


_RULES = {
    "eval-lossless": "every token is the argmax of its own logits, and a prefill confirms it as well as without "
    "speculation",
    "eval-smoke": "every check holds",
    "eval-tools": "every judged check holds, and tools are called as in the vendor's answers or the baseline",
}
_COUNTS = ("problems", "failed", "truncated", "without_marker", "empty")
_ACCURACIES = ("metric", "solved", "measured [95%]", "published [95%]", "by", "difference [90%]", "source")
_SOLVED = ("both solve", "only this run", "only the baseline", "neither")
_PAIRED = ("metric", *_SOLVED, "difference [90%]", "McNemar p", "power")
_DIFFERING = ("problem", "question", "answer", "solved by", "this run", "baseline")

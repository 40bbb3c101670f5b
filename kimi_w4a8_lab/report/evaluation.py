"""Content of an evaluation's page: verdict with its reasons, accuracies beside reported ones, checks, differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD

from ..accuracy import significance
from ..accuracy.greedy_match import Divergence
from ..base.verdict import Verdict
from ..speed.statistics import Interval
from .page import Page, Picture, Section, Table, Tone, Words

TITLES = {
    "eval-accuracy": "Accuracy",
    "eval-lossless": "Lossless speculation",
    "eval-exact": "Lossless speculation, bit for bit",
    "eval-smoke": "Smoke test",
    "eval-tools": "Tool calls",
    "eval-agent": "Conversations with tools",
}
TONES: dict[Verdict | None, Tone] = {Verdict.PASS: "better", Verdict.FAIL: "worse", Verdict.INVALID: "worse"}
Result = Mapping[str, Any]


def is_evaluation(folder: Path) -> bool:
    try:
        return json.loads((folder / "result.json").read_text()).get("kind") in TITLES
    except (OSError, ValueError, AttributeError):
        return False


def page(folder: Path) -> tuple[Page, Verdict]:
    """Return the page and the verdict of a finished evaluation. Raises KimiError for any other folder."""
    if not is_evaluation(folder):
        raise KimiError(
            "not a finished evaluation", str(folder), "a run directory of `kimi-w4a8 eval` with result.json"
        )
    result = json.loads((folder / "result.json").read_text())
    try:  # earlier versions call the conclusion the report
        judged = result.get("verdict") or result.get("report") or {"reasons": [], **result}
        state = Verdict(judged["state"])
        return _page(folder, result, judged, state), state
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"result.json lacks what this version shows: {type(error).__name__}: {error}"
        raise KimiError(what, str(folder), "a run of this version", "evaluate again") from error


def _page(folder: Path, result: Result, judged: Result, state: Verdict) -> Page:
    title = f"Accuracy: {result['task']}" if result["kind"] == "eval-accuracy" else TITLES[result["kind"]]
    rule = f"PASS means: {found}." if (found := _rule(result, judged)) else ""
    about = " ".join(filter(None, (f"{folder.resolve().name}.", rule, _versions(folder))))
    head = f"{state.headline}: {title}, {result['configuration']}"
    words, sections = [Words(reason) for reason in judged["reasons"]], list(_sections(result, judged))
    return Page(head, words, about, _chart(result, judged), sections=sections, tone=TONES.get(state, ""))


def _sections(result: Result, judged: Result) -> Iterator[Section]:
    rows = [row for found in judged.get("accuracies", ()) for row in _accuracy(found, judged)]
    yield Section("Measured and published", tables=[Table(_ACCURACIES, rows)])
    counts = {name.replace("_", " "): judged[name] for name in _COUNTS if name in judged} | result.get("requests", {})
    counts |= {f"ended with {name}": count for name, count in result.get("finish_reasons", {}).items()}
    yield Section("Requests", tables=[Table(list(counts), [list(map(str, counts.values()))] if counts else [])])
    for title, key, columns, closed in _TABLES:
        rows = [[_cell(row[name]) for name in columns] for row in result.get(key) or judged.get(key) or ()]
        yield Section(title, tables=[Table(list(columns.values()), rows)], closed=closed)
    parted = "\n".join(str(Divergence(**found)) for found in judged.get("divergences", ()))
    yield Section("First differences of greedy answers", listings=[("all of them", parted)] if parted else ())


def _cell(value: object) -> Words:
    if isinstance(value, bool):
        return Words("passed", "better") if value else Words("failed", "worse")
    if isinstance(value, dict) and "low" in value:
        return Words(_interval(value, "+"))
    if isinstance(value, (dict, list)):
        return Words(json.dumps(value, ensure_ascii=False), literal=True)
    return Words(f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value))


def _accuracy(found: Result, judged: Result) -> Iterator[list[str | Words]]:
    """Yield a row of one metric for each reported accuracy, or one row without any."""
    inside = found["interval"]
    ours = [found["metric"], f"{found['correct']} of {found['answered']}", _interval(inside) if inside else ""]
    compared = [row for row in judged.get("references", ()) if row["reference"]["metric"] == found["metric"]]
    for row in compared:
        reference = row["reference"]
        theirs = f"{_interval(_wilson(reference))} of {reference['n']}"
        yield [
            *ours,
            theirs,
            reference["configuration"],
            _interval(row["difference"], "+"),
            Words(reference["source"], "soft"),
        ]
    if not compared:
        yield [*ours, "", "", "", ""]


def _chart(result: Result, judged: Result) -> Picture | None:
    """Draw the accuracies beside the reported ones, or the rows that the run gives for its chart."""
    if "chart" in result:
        return chart(result["chart"]["name"], [(*row[:3], Interval(*row[3:])) for row in result["chart"]["rows"]])
    measured = [
        (found["metric"], result["configuration"], False, found["interval"])
        for found in judged.get("accuracies", ())
        if found["interval"]
    ]
    reported = [found["reference"] for found in judged.get("references", ())]
    shares = measured + [(found["metric"], found["configuration"], True, _wilson(found)) for found in reported]
    return chart(
        "share solved (%)", [(*row, Interval(*(100 * limit for limit in share.values()))) for *row, share in shares]
    )


def chart(name: str, bars: Sequence[tuple[str, str, bool, Interval]]) -> Picture | None:
    """Draw bars, given as group, side, published, and value; None without any, or without matplotlib."""
    if not bars or find_spec("matplotlib") is None:
        return None
    from .plots import Bar, panel  # optional: matplotlib

    return panel("lead", name, [Bar(*bar) for bar in bars])


def _wilson(reference: Result) -> Result:
    return asdict(significance.wilson(round(reference["accuracy"] * reference["n"]), reference["n"]))


def _interval(found: Result, sign: str = "") -> str:
    return format(significance.ShareInterval(**found), sign)


def _rule(result: Result, judged: Result) -> str:
    """Return the meaning of PASS in a sentence; empty when nothing was compared."""
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
    "eval-exact": "tokens and logprobs are equal bit for bit, with no rule for ties",
    "eval-smoke": "every check holds",
    "eval-tools": "every judged check holds, and tools are called as in the vendor's answers or the baseline",
}
_COUNTS = ("problems", "failed", "truncated", "without_marker", "empty")
_ACCURACIES = ("metric", "solved", "measured [95%]", "published [95%]", "by", "difference [90%]", "source")
# Title, key of the rows, column titles by field, and whether only the page lists them.
_SOLVED = {"both": "both solve", "only_new": "only this run", "only_base": "only the baseline", "neither": "neither"}
_PAIRED = {"metric": "metric", **_SOLVED, "difference": "difference [90%]", "mcnemar_p": "McNemar p", "power": "power"}
_PROBLEM = {"id": "problem", "question": "question", "target": "answer", "solved_by": "solved by"}
_SERVER = ("server", "verify steps", "tokens of verify steps", "prompt tokens from the cache", "retracted")
_DIFFERENCE = ("side", "concurrency", "request", "kind", "position", "what")
_TABLES: Sequence[tuple[str, str, dict[str, str], bool]] = (
    ("Checks", "checks", {"name": "check", "found": "found", "wanted": "wanted", "passed": "result"}, False),
    ("What the servers did", "servers", {name: name for name in _SERVER}, False),
    ("Answers that differ", "differences", {name: name for name in _DIFFERENCE}, True),
    ("Against the baseline, problem by problem", "paired", _PAIRED, False),
    ("Calls that do not fit their schema", "invalid", {"problem": "what is wrong", "calls": "the calls"}, True),
    ("Problems that only one side solves", "differing", {**_PROBLEM, "new": "this run", "base": "baseline"}, True),
)

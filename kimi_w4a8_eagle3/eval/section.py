"""HTML of a finished evaluation: a section for a larger report, and a page in the run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from ..base.files import write_atomic
from ..base.run_dir import RECORD
from ..base.verdict import Verdict
from . import significance
from .significance import REPORTED_MARGIN

PAGE = "report.html"
_TITLES = {
    "eval-accuracy": "Accuracy",
    "eval-lossless": "Is speculation lossless?",
    "eval-smoke": "Smoke test",
    "eval-tools": "Tool calls",
}
STYLE = """
:root { color-scheme: light dark; --line: #dcdce0; --soft: #66666b; --good: #23743f; --bad: #a8323e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3a40; --soft: #9a9aa2; --good: #6cc58a; --bad: #ee8792; } }
body { font: 15px/1.5 "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; max-width: 1080px; margin: 2rem auto; }
section { overflow-x: auto; padding: 0 1.2rem; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; min-width: 560px; margin: .6rem 0 1rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, .text { text-align: left; } pre { white-space: pre-wrap; margin: 0; }
.soft { color: var(--soft); } .better { color: var(--good); } .worse { color: var(--bad); }
"""


def is_evaluation(folder: Path) -> bool:
    """True if a run directory holds a finished evaluation."""
    try:
        return json.loads((folder / "result.json").read_text()).get("kind") in _TITLES
    except (OSError, ValueError, AttributeError):
        return False


def section(folder: Path) -> str:
    """Render the run in `folder` as one escaped `<section>` that needs no script and no other files.

    Raises KimiError when `folder` is not the directory of a finished evaluation.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    if not is_evaluation(folder):
        raise KimiError(
            "not a finished evaluation", str(folder), "a run directory of `kimi-w4a8 eval` with result.json"
        )
    result = json.loads((folder / "result.json").read_text())
    content = _content(result)
    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.eval", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("section.html.jinja").render(
        run=folder.name,
        rule=_rule(result),
        headline=Verdict(content["state"]).headline,
        versions=_versions(folder),
        **content,
    )


def write_page(folder: Path) -> Path:
    """Write the evaluation's page into its run directory and return its path."""
    return write_pages([folder], folder / PAGE)


def write_pages(folders: Sequence[Path], page: Path) -> Path:
    """Write one page with a section for each evaluation and return its path."""
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    title = "; ".join(map(_summary, folders))
    head = f"<!doctype html><html lang=en><meta charset=utf-8>{viewport}<title>{escape(title)}</title>"
    return _write(page, f"{head}<style>{STYLE}</style><body>{''.join(map(section, folders))}</body></html>")


def append_sections(page: Path, folders: Sequence[Path]) -> Path:
    """Append a section for each evaluation to a finished page and return its path."""
    body, end, rest = page.read_text(encoding="utf-8").rpartition("</body>")
    return _write(page, f"{body}{''.join(map(section, folders))}{end}{rest}")


def _write(page: Path, text: str) -> Path:
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text)
    return page


def _content(result: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables for a result of any kind."""
    kind = result["kind"]
    tables = ("accuracies", "references", "paired", "differing", "divergences", "checks", "invalid")
    content: dict[str, Any] = {name: [] for name in tables}
    content |= {"title": _TITLES[kind], "configuration": result["configuration"]}
    if kind in ("eval-accuracy", "eval-tools"):
        verdict = result["verdict"]
        content |= {name: verdict[name] for name in ("state", "reasons", "accuracies", "paired", "differing")}
        content["references"] = [_with_interval(reference) for reference in verdict["references"]]
        content |= {name: result[name] for name in ("checks", "invalid") if name in result}
        content["title"] = f"Accuracy: {result['task']}" if kind == "eval-accuracy" else _TITLES[kind]
    elif kind == "eval-lossless":
        content |= {name: result["report"][name] for name in ("state", "reasons", "divergences")}
    else:
        checks = result["checks"]
        content |= {"state": result["state"], "reasons": [f"{c['name']}: {c['found']} ({c['wanted']})" for c in checks]}
    return content


def _summary(folder: Path) -> str:
    """Return the page title: verdict, evaluation and configuration."""
    content = _content(json.loads((folder / "result.json").read_text()))
    return f"{Verdict(content['state']).headline}: {content['title']}, {content['configuration']}"


def _rule(result: dict[str, Any]) -> str:
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
        return f"the 90% interval of the difference to what was reported lies above -{REPORTED_MARGIN * 100:g} points"
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


def _with_interval(found: dict[str, Any]) -> dict[str, Any]:
    reference = found["reference"]
    interval = significance.wilson(round(reference["accuracy"] * reference["n"]), reference["n"])
    return {**found, "low": interval.low, "high": interval.high}

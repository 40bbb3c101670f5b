"""A finished evaluation as HTML: a section for a larger report, and a page of its own in the run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from ..base.errors import KimiError
from ..base.files import write_atomic
from . import significance

PAGE = "report.html"
_TITLES = {
    "eval-accuracy": "Accuracy",
    "eval-lossless": "Is speculation lossless?",
    "eval-smoke": "Smoke test",
    "eval-tools": "Tool calls",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; max-width: 1080px; margin: 2rem auto; }
section { overflow-x: auto; padding: 0 1.2rem; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; margin: .6rem 0 1rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #dcdce0; vertical-align: top; }
th:first-child, td:first-child, .text { text-align: left; } pre { white-space: pre-wrap; margin: 0; }
.soft { color: #66666b; } .better { color: #23743f; } .worse { color: #a8323e; } svg { max-width: 100%; height: auto; }
"""


def is_evaluation(folder: Path) -> bool:
    """Whether a run directory holds a finished evaluation."""
    try:
        return json.loads((folder / "result.json").read_text()).get("kind") in _TITLES
    except (OSError, ValueError, AttributeError):
        return False


def section(folder: Path) -> str:
    """One `<section>` for the run in `folder`, escaped and without outside files; needs no script.

    Raises KimiError when `folder` is not the directory of a finished evaluation.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    if not is_evaluation(folder):
        raise KimiError("not the folder of a finished evaluation", str(folder), "a run of `eval` with result.json")
    result = json.loads((folder / "result.json").read_text())
    environment = Environment(
        loader=PackageLoader("kimi_w4a8_eagle3.eval", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("section.html.jinja").render(run=folder.name, **_content(result))


def write_page(folder: Path) -> Path:
    """Write the section as a page of its own into the run directory; returns its path."""
    return write_pages([folder], folder / PAGE)


def write_pages(folders: Sequence[Path], page: Path) -> Path:
    """One page with a section for each evaluation; returns its path."""
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"Evaluation: {', '.join(folder.name for folder in folders)}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8>{viewport}<title>{escape(title)}</title>"
    return _write(page, f"{head}<style>{STYLE}</style><body>{''.join(map(section, folders))}</body></html>")


def append_sections(page: Path, folders: Sequence[Path]) -> Path:
    """Add a section for each evaluation to the end of a finished page; returns the page."""
    body, end, rest = page.read_text(encoding="utf-8").rpartition("</body>")
    return _write(page, f"{body}{''.join(map(section, folders))}{end}{rest}")


def _write(page: Path, text: str) -> Path:
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text)
    return page


def _content(result: dict[str, Any]) -> dict[str, Any]:
    """What the template shows of a result, whatever its kind."""
    kind = result["kind"]
    tables = ("accuracies", "references", "paired", "differing", "divergences", "checks", "invalid")
    content: dict[str, Any] = {name: [] for name in tables}
    content |= {"title": _TITLES[kind], "configuration": result["configuration"]}
    if kind in ("eval-accuracy", "eval-tools"):
        verdict = result["verdict"]
        content |= {name: verdict[name] for name in ("state", "reasons", "accuracies", "paired", "differing")}
        content["references"] = [_with_interval(each) for each in verdict["references"]]
        content |= {name: result[name] for name in ("checks", "invalid") if name in result}
        content["title"] = f"Accuracy: {result['task']}" if kind == "eval-accuracy" else _TITLES[kind]
    elif kind == "eval-lossless":
        content |= {name: result["report"][name] for name in ("state", "reasons", "divergences")}
    else:
        checks = result["checks"]
        content |= {"state": result["state"], "reasons": [f"{c['name']}: {c['found']} ({c['wanted']})" for c in checks]}
    return content


def _with_interval(found: dict[str, Any]) -> dict[str, Any]:
    reference = found["reference"]
    interval = significance.wilson(round(reference["accuracy"] * reference["n"]), reference["n"])
    return {**found, "low": interval.low, "high": interval.high, "within_noise": found["p"] >= significance.ALPHA}

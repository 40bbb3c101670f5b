"""The pages of bench, eval and accept in a browser, wide and narrow: `build/screens.png` is for people to look at."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_eagle3.accept import claims
from kimi_w4a8_eagle3.accept.journal import Journal
from kimi_w4a8_eagle3.bench.runs import Run
from kimi_w4a8_eagle3.report import evaluation
from kimi_w4a8_eagle3.report.analysis import Analysis
from kimi_w4a8_eagle3.report.measured import page
from kimi_w4a8_eagle3.report.page import write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURE = Path(__file__).parents[2] / "build" / "screens.png"
WIDTHS, HEIGHT = (1400, 500), 900
# What a reader must see without scrolling, by page.
FIRST = {"bench": "figure.lead", "eval": "figure.lead", "accept": ".verdict"}
# Runs in a page that shows all pages in frames; what it finds becomes its text.
SCRIPT = """
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, box = each => each.getBoundingClientRect();
    const first = [...page.querySelectorAll(frame.dataset.first)].map(each => box(each).bottom);
    const images = [...page.images].filter(each => each.checkVisibility());
    return { page: frame.name, width: frame.clientWidth, scrolls: page.documentElement.scrollWidth,
             first: first.length ? first[0] : null, images: images.length,
             empty: images.filter(each => !each.naturalWidth || box(each).width < 100).length };
  });
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""
LONG = "How many legs do 6 hens and 3 cows have in all, when nobody counts the farmer's own? " * 3


@pytest.fixture
def pages(copies: Callable[..., Run], tmp_path: Path) -> dict[str, Path]:
    """One of each kind, with everything that is wide in it."""
    runs = [copies("a", "tiny:plain", 3.0, 3, acceptance=None), copies("b", "tiny", 1.0, 3)]
    interval = {"value": 0.974, "low": 0.956, "high": 0.985}
    accuracy = {"metric": "strict-match", "correct": 487, "answered": 500, "interval": interval}
    paired = {"metric": "strict-match", "both": 480, "only_new": 7, "only_base": 6, "neither": 7, "margin": 0.01}
    paired |= {"difference": {"value": 0.002, "low": -0.008, "high": 0.012}, "mcnemar_p": 1.0, "power": 0.66}
    differing = {
        "id": 3,
        "question": LONG,
        "target": "24",
        "solved_by": {"strict-match": "new"},
        "new": LONG,
        "base": "",
    }
    verdict = {
        "state": "pass",
        "reasons": ["not worse"],
        "accuracies": [accuracy],
        "references": [],
        "paired": [paired],
    }
    result = {
        "kind": "eval-accuracy",
        "task": "tiny-math",
        "configuration": "tiny",
        "verdict": {**verdict, "differing": [differing]},
    }
    run = tmp_path / "eval"
    run.mkdir()
    (run / "result.json").write_text(json.dumps(result))
    return {
        "bench": write_page(page(Analysis(runs)), tmp_path / "report"),
        "eval": write_page(evaluation.page(run), run),
        "accept": write_page(claims.page([], Journal(tmp_path, {"sglang": "1.2"})), tmp_path),
    }


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_the_first_screen_says_what_was_found_and_nothing_runs_over(pages: dict[str, Path], tmp_path: Path) -> None:
    found = look(pages, tmp_path)
    assert len(found) == len(pages) * len(WIDTHS) and PICTURE.stat().st_size > 100_000
    for each in found:
        assert each["scrolls"] <= each["width"], each
        assert each["first"] is not None and 0 < each["first"] < HEIGHT, each
        assert each["empty"] == 0 and (each["images"] > 5 or each["page"] != "bench"), each


def look(pages: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """Measures of each page at each width, by one start of the browser, which takes the picture too."""
    frames = "".join(
        f'<iframe name={name} src="{escape(path.as_uri())}" width={width} height={HEIGHT} data-first="{FIRST[name]}"'
        ' style="border: 0; margin: 5px; background: white"></iframe>'
        for name, path in pages.items()
        for width in WIDTHS
    )
    album = folder / "album.html"
    album.write_text(
        f"<!doctype html><body style='margin: 0; background: gray'><pre hidden></pre>{frames}<script>{SCRIPT}</script>"
    )
    PICTURE.parent.mkdir(exist_ok=True)
    size = f"{sum(WIDTHS) + 60},{(HEIGHT + 20) * len(pages)}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    options += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", f"--window-size={size}"]
    wanted = [f"--screenshot={PICTURE}", "--dump-dom", album.as_uri()]
    done = subprocess.run([str(BROWSER), *options, *wanted], capture_output=True, text=True, timeout=120)
    text = re.search(r"<pre[^>]*>(.+?)</pre>", done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    measures: list[dict[str, Any]] = json.loads(unescape(text[1]))
    return measures

"""The pages of bench, eval and accept in a browser: wide and narrow (`build/screens.png`), dark, and printed."""

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
from matplotlib import pyplot

from kimi_w4a8_eagle3.accept import claims
from kimi_w4a8_eagle3.accept.journal import Figure, Journal, StageResult
from kimi_w4a8_eagle3.base.verdict import Verdict
from kimi_w4a8_eagle3.bench.runs import Run
from kimi_w4a8_eagle3.report import evaluation
from kimi_w4a8_eagle3.report.analysis import Analysis
from kimi_w4a8_eagle3.report.measured import page
from kimi_w4a8_eagle3.report.page import write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURE = Path(__file__).parents[2] / "build" / "screens.png"
WIDTHS, HEIGHT = (1400, 500), 900
# What a reader must see without scrolling, by page.
FIRST = {"bench": "h1, figure.lead", "eval": "h1, figure.lead", "accept": "h1, figure.lead"}
MOST_PAGES = 3  # printed
# Runs in a page that shows all pages in frames; what it finds becomes its text.
SCRIPT = """
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, box = shown => shown.getBoundingClientRect();
    const first = [...page.querySelectorAll(frame.dataset.first)].map(shown => box(shown).bottom);
    const images = [...page.images].filter(image => image.checkVisibility());
    return { page: frame.name, width: frame.clientWidth, scrolls: page.documentElement.scrollWidth,
             first: first.length > 1 ? Math.max(...first) : null, images: images.length,
             empty: images.filter(image => !image.naturalWidth || !image.alt || box(image).width < 100).length };
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
    figures = [Figure("TPOT median", 27.4, "ms", 26.1, 27.79), Figure("TTFT median", 812.0, "ms", 790.0)]
    names = [f"{recipe}: {stage}" for recipe in ("agent", "w4a8", "eagle3") for stage in ("start", "con2", "con40")]
    results = {
        name: StageResult(name, "", Verdict.PASS, LONG, 60.0, figures) for name in (*names, *"abcdefghijklmnopq")
    }
    failed = StageResult("chat", "", Verdict.FAIL, "<script>alert(1)</script>")
    return {
        "bench": write_page(page(Analysis(runs)), tmp_path / "report"),
        "eval": write_page(evaluation.page(run)[0], run),
        "accept": write_page(claims.page(Journal(tmp_path, {"sglang": "1.2"}, {**results, "chat": failed})), tmp_path),
    }


needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


@needs_browser
def test_the_first_screen_has_verdict_and_chart_and_nothing_runs_over(pages: dict[str, Path], tmp_path: Path) -> None:
    found = look(pages, tmp_path)
    assert len(found) == len(pages) * len(WIDTHS) and PICTURE.stat().st_size > 100_000
    for screen in found:
        assert screen["scrolls"] <= screen["width"], screen
        assert screen["first"] is not None and 0 < screen["first"] < HEIGHT, screen
        assert screen["empty"] == 0 and (screen["images"] > 5 or screen["page"] != "bench"), screen


@needs_browser
def test_a_page_is_dark_in_the_dark_and_short_on_paper(pages: dict[str, Path], tmp_path: Path) -> None:
    for name, path in pages.items():
        picture, paper = tmp_path / f"{name}.png", tmp_path / f"{name}.pdf"
        browse(tmp_path, "--blink-settings=preferredColorScheme=0", f"--screenshot={picture}", path.as_uri())
        browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", path.as_uri())
        assert pyplot.imread(picture)[..., :3].mean() < 0.3, name
        assert 1 <= paper.read_bytes().count(b"/Type /Page\n") <= MOST_PAGES, name


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
    wanted = [f"--window-size={size}", f"--screenshot={PICTURE}", "--dump-dom", album.as_uri()]
    done = browse(folder, *wanted)
    text = re.search(r"<pre[^>]*>(.+?)</pre>", done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    measures: list[dict[str, Any]] = json.loads(unescape(text[1]))
    return measures


def browse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    options += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
    return subprocess.run([str(BROWSER), *options, *words], capture_output=True, text=True, timeout=120)

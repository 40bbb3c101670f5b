"""The pages of every kind of run in a browser: wide, narrow and dark (`build/screens*.png`), and printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot
from support.browser import BUILD, DARK, browse, needs_browser
from support.every_page import HOSTILE, every_page

from kimi_w4a8_lab.speed.runs import Run

WIDTHS, HEIGHT = (1400, 500), 900
MOST_PAGES = 3  # printed
# Runs in a page that shows all pages in frames; what it finds becomes its text. The verdict and the chart are what a
# reader must see without scrolling.
SCRIPT = """
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, box = shown => shown.getBoundingClientRect();
    const first = [...page.querySelectorAll("h1, figure.lead")].map(shown => box(shown).bottom);
    const images = [...page.images].filter(image => image.checkVisibility());
    return { page: frame.name, width: frame.clientWidth, scrolls: page.documentElement.scrollWidth, title: page.title,
             first: first.length > 1 ? Math.max(...first) : null, images: images.length,
             empty: images.filter(image => !image.naturalWidth || !image.alt || box(image).width < 100).length };
  });
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


@pytest.fixture
def pages(copies: Callable[..., Run], tmp_path: Path) -> dict[str, Path]:
    return every_page(copies, tmp_path / "pages")


def test_hostile_text_stays_text_in_every_page_and_picture(pages: dict[str, Path]) -> None:
    shown = [path.name for path in pages.values() if escape(HOSTILE)[:20] in path.read_text()]
    assert len(shown) == len(pages) - 1  # a benchmark shows no text of its prompts
    for path in pages.values():
        assert "<script" not in path.read_text() and "<img src=x" not in path.read_text(), path
        for picture in path.parent.glob("*.svg"):
            tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()}
            assert not tags & {"script", "img", "image", "foreignObject"}, picture


@needs_browser
def test_the_first_screen_has_verdict_and_chart_and_nothing_runs_over(pages: dict[str, Path], tmp_path: Path) -> None:
    for colours, dark in (("screens.png", False), ("screens-dark.png", True)):
        found = look(pages, tmp_path, BUILD / colours, dark)
        assert len(found) == len(pages) * len(WIDTHS)
        for screen in found:
            assert screen["scrolls"] <= screen["width"] and screen["title"] != "owned", screen
            assert screen["first"] is not None and 0 < screen["first"] < HEIGHT, screen
            assert screen["empty"] == 0 and (screen["images"] > 5 or screen["page"] != "bench"), screen
    assert pyplot.imread(BUILD / "screens-dark.png")[..., :3].mean() < 0.3


@needs_browser
def test_a_page_is_short_on_paper(pages: dict[str, Path], tmp_path: Path) -> None:
    for name, path in pages.items():
        paper = BUILD / f"{name}.pdf"
        browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", path.as_uri())
        assert 1 <= paper.read_bytes().count(b"/Type /Page\n") <= MOST_PAGES, name


def look(pages: dict[str, Path], folder: Path, picture: Path, dark: bool) -> list[dict[str, Any]]:
    """Measures of each page at each width, by one start of the browser, which takes the picture too."""
    frames = "".join(
        f'<iframe name={name} src="{escape(path.as_uri())}" width={width} height={HEIGHT}'
        f' style="border: 0; margin: 5px; background: {"black" if dark else "white"}"></iframe>'
        for name, path in pages.items()
        for width in WIDTHS
    )
    album = folder / "album.html"
    album.write_text(
        "<!doctype html><meta name=color-scheme content='light dark'><body style='margin: 0'>"
        f"<pre hidden></pre>{frames}<script>{SCRIPT}</script>"
    )
    size = f"{sum(WIDTHS) + 60},{(HEIGHT + 20) * len(pages)}"
    wanted = [*[DARK] * dark, f"--window-size={size}", f"--screenshot={picture}", "--dump-dom", album.as_uri()]
    done = browse(folder, *wanted)
    text = re.search(r"<pre[^>]*>(.+?)</pre>", done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    measures: list[dict[str, Any]] = json.loads(unescape(text[1]))
    return measures

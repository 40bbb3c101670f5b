"""Draw the README's picture as the page of a benchmark does: the speed-up over the accept length, as published.

python -m proof.pictures
"""

from __future__ import annotations

from pathlib import Path

from kimi_w4a8_lab.report.page import Picture
from kimi_w4a8_lab.report.plots import speedup_curves
from kimi_w4a8_lab.report.speedup import from_published

PATH = Path(__file__).parents[1] / "docs" / "images" / "bench-speedup.svg"
_COLOURS = {"#3f7fc4": "Blue", "#c8772e": "Orange"}


def picture() -> Picture:
    return speedup_curves(from_published())


def caption(shown: Picture) -> str:
    """Return the legend in words, because the file itself has none."""
    return ". ".join(f"{_COLOURS[colour]}: {title}" for title, colour in shown.legend) + "."


if __name__ == "__main__":
    found = picture()
    PATH.write_bytes(found.svg)
    print(f"{PATH}\n{found.alt}\n{caption(found)}")

"""The pages of every kind of run show hostile text as text."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.every_page import HOSTILE, every_page

from kimi_w4a8_lab.speed.runs import Run


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

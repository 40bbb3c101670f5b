"""The pictures of the docs that are drawn from code: current, and what a browser may load."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from proof import diagrams, recording


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_committed_diagram_is_what_the_code_draws(name: str) -> None:
    assert (diagrams.IMAGES / name).read_text() == diagrams.drawn(*diagrams.DIAGRAMS[name])


def test_folders_that_the_way_of_a_request_names_exist() -> None:
    named = [step.title.partition(": ")[2] for step in diagrams.REQUEST if step.title.endswith("/")]
    assert len(named) > 4 and {name for name in named if not (diagrams.PACKAGE / name).is_dir()} == set()


def test_the_recording_is_whole_and_asks_no_other_host() -> None:
    svg = recording.PATH.read_text()
    ElementTree.fromstring(svg)
    assert "@font-face" not in svg and "url(http" not in svg and svg.count("animation: line") > 40


def test_lines_appear_in_order_after_the_end_was_shown_and_waits_are_short() -> None:
    svg = recording.played("<svg><style>a {}</style></svg>", [0.5, 20.0, 20.1])
    assert re.findall(r"animation: line ([\d.]+)s 2s }", svg) == ["0.50", "2.00", "2.10"]
    assert "from, to { opacity: 0 }" in svg  # no fill: a line is shown before its animation begins and after it
    assert "@media screen and (prefers-reduced-motion: no-preference)" in svg

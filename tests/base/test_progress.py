"""Progress that a user sees while gigabytes travel: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from kimi_w4a8_lab.base.progress import ByteProgress


def shown(every: float, terminal: bool = False) -> str:
    out = io.StringIO()
    with ByteProgress(
        Console(file=out, force_terminal=terminal, width=120), "org/model (3 files)", 1000, every
    ) as progress:
        for _ in range(3):
            progress.advance(250)
        progress.advance(-250)
    return out.getvalue()


def test_a_log_gets_whole_lines_that_count_what_was_taken_back():
    lines = shown(every=0).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "org/model (3 files): 250 bytes of 1.0 kB (25%)",
        "org/model (3 files): 500 bytes of 1.0 kB (50%)",
        "org/model (3 files): 750 bytes of 1.0 kB (75%)",
        "org/model (3 files): 500 bytes of 1.0 kB (50%)",
    ]


def test_a_log_is_not_flooded():
    assert shown(every=3600) == ""


def test_a_terminal_gets_a_bar():
    text = shown(every=0, terminal=True)
    assert "org/model (3 files)" in text and "0.5/1.0 kB" in text

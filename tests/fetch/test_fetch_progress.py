"""Progress that a user sees while gigabytes travel: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from kimi_w4a8_eagle3.fetch.progress import ByteProgress, counted_reads


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


def test_reads_of_this_thread_are_counted(tmp_path):
    """huggingface_hub hashes a checkpoint in this thread and prints nothing."""
    counted: list[int] = []

    class Counting(ByteProgress):
        def advance(self, count: int) -> None:
            counted.append(count)

    path = tmp_path / "weights"
    path.write_bytes(bytes(5_000_000))
    with counted_reads(Counting(Console(quiet=True), "hashing", 1), every=0.001):
        path.read_bytes()
        while sum(counted) < 5_000_000:
            pass
    assert sum(counted) < 5_100_000
    assert Path("/proc/self/task").is_dir()

"""`doctor`, `plan` and `gates` on a terminal of 80 columns, without color."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "eagle3"],
        ["plan", "agent", "--gpu", "mi325x"],
        ["plan", "agent", "--gpu", "mi300x,mi325x"],
        ["gates"],
    ],
)
def test_no_line_is_wider_than_the_terminal_and_none_is_colored(words: list[str]) -> None:
    output = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}).invoke(app, words).output
    lines = output.splitlines()
    assert len(lines) > 5 and "\x1b" not in output
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []

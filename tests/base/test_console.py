"""Output of commands without a terminal."""

import pytest
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_lab.base.request_progress import request_progress


def test_a_table_in_a_log_file_is_as_wide_as_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*("a heading of twenty-five " * 2 for _ in range(4)))
    table.add_row(*("x" * 50 for _ in range(4)))
    table_console().print(table)
    assert capsys.readouterr().out.count("x" * 50) == 4


@pytest.mark.parametrize(("every", "lines"), [(0.0, ["requests: 1 of 3, 9 tokens", "requests: 2 of 3"]), (3600.0, [])])
def test_a_log_gets_lines_of_progress_on_standard_error(
    every: float, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with request_progress("requests", 3, table_console(), every) as show:
        show(1, "9 tokens")
        show(2, "")
    found = capsys.readouterr()
    assert found.err.splitlines() == lines and found.out == ""

"""Output of commands without a terminal."""

import pytest
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console


def test_a_table_in_a_log_file_is_as_wide_as_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*("a heading of twenty-five " * 2 for _ in range(4)))
    table.add_row(*("x" * 50 for _ in range(4)))
    table_console().print(table)
    assert capsys.readouterr().out.count("x" * 50) == 4

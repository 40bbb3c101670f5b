"""What commands print where there is no terminal."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.commands.demo_run import _stream


def test_a_table_in_a_log_file_is_as_wide_as_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*("a heading of twenty-five " * 2 for _ in range(4)))
    table.add_row(*("x" * 50 for _ in range(4)))
    table_console().print(table)
    assert capsys.readouterr().out.count("x" * 50) == 4


def test_what_follows_the_streamed_answer_begins_a_line() -> None:
    class Client:
        def stream_chat(self, question: str, max_tokens: int) -> list[str]:
            return ["4", "2"]

    console = Console(file=(out := io.StringIO()), width=60)
    _stream(Client(), "6 x 7?", "W4A8", console)  # type: ignore[arg-type]
    console.print("next")
    lines = out.getvalue().splitlines()
    assert lines[-1] == "next" and lines[-2].endswith("\u256f")

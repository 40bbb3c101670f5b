"""Text of strangers reaches the terminal without its control characters."""

from __future__ import annotations

import pytest
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError

TEXT = "name\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\n日本"
SHOWN = "name?[2J?]0;title??31m??\n日本"


def test_a_message_has_no_control_characters_but_newlines() -> None:
    error = KimiError(TEXT, where=TEXT, expected=TEXT, remedy=TEXT)
    assert str(error).startswith(SHOWN) and str(error).count(SHOWN) == 4
    assert not set(str(error)) & set("\x1b\x07\x9b\u202e\r")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_has_no_control_characters_of_its_texts(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    table = Table(TEXT)
    table.add_row(TEXT)
    console = table_console()
    console.print(table)
    console.print(TEXT)
    shown = capsys.readouterr().out
    assert "?]0;title" in shown and "日本" in shown
    assert "\x1b[2J" not in shown and "\x1b]0" not in shown and not set(shown) & set("\x07\x9b\u202e")

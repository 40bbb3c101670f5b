"""Each event is one line, a full disk does not end the engine, and the engine's log is shown."""

import io
import json
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from kimi_w4a8_eagle3.base.run_dir import EVENTS, WANTED, EventLog
from kimi_w4a8_eagle3.supervision.serve import follow


def test_one_json_line_and_one_line_for_a_person(tmp_path):
    shown = io.StringIO()
    EventLog(tmp_path, Console(file=shown, width=120))("tiny", "ready", "after [3] s")
    (line,) = (tmp_path / EVENTS).read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time") > 1e9
    assert event == {"source": "tiny", "event": "ready", "reason": "after [3] s"}
    assert shown.getvalue() == "kimi-w4a8: tiny ready: after [3] s\n"


def test_an_end_that_was_wanted_is_not_red(tmp_path):
    shown = io.StringIO()
    events = EventLog(tmp_path, Console(file=shown, width=120, force_terminal=True, color_system="standard"))
    events("tiny", "down", WANTED)
    events("tiny", "down", "the engine ended by itself")
    wanted, broken = shown.getvalue().splitlines()
    assert wanted == f"kimi-w4a8: tiny down: {WANTED}" and broken.startswith("\x1b[31m")


def test_a_full_terminal_does_not_keep_the_event_from_its_file(tmp_path):
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:  # closing it fails too
        EventLog(tmp_path, Console(file=full))("tiny", "down", "why")
    assert json.loads((tmp_path / EVENTS).read_text())["event"] == "down"


def test_after_a_full_disk_the_next_event_has_a_line_of_its_own(tmp_path, monkeypatch):
    events = EventLog(tmp_path, Console(file=io.StringIO()))
    path = tmp_path / EVENTS
    path.symlink_to("/dev/full")
    events("tiny", "lost", "")
    path.unlink()
    path.write_text('{"time": 1, "sour')
    events("tiny", "kept", "")
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "kept"


def test_a_log_is_copied_that_begins_after_the_copying(tmp_path, capsys):
    """The engine makes its log when it starts, which is later."""
    log = tmp_path / "server.log"
    with follow(log):
        time.sleep(0.1)
        with log.open("a") as file:
            file.write("first\n")
        time.sleep(0.3)
        with log.open("a") as file:
            file.write("last\n")
    assert capsys.readouterr().out == "first\nlast\n"

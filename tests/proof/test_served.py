"""An engine is ready by its events, and remains of a server are found."""

import json
import socket
import sys

import pytest
from support.waiting import until

from proof.load import served
from proof.load.served import Event, Leftovers, ServedEngine, ready_since


def events(text):
    """`time event` a line."""
    return [Event(float(at), "tiny", event, "") for at, event in (line.split() for line in text.split(", "))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 starting", None),
        ("1 starting, 2 checking, 3 ready", 3.0),
        ("3 ready, 7 stalled", None),
        ("3 ready, 7 draining", None),
        ("3 ready, 7 down, 8 restarting, 9 ready", 9.0),
        ("3 ready, 7 renewal", 3.0),
    ],
)
def test_an_engine_is_ready_by_its_last_phase(text, expected):
    assert ready_since(events(text)) == expected


def test_a_line_that_a_full_disk_cut_off_hides_no_other(tmp_path):
    run = tmp_path / "runs" / "20260101T000000Z-serve-tiny"
    run.mkdir(parents=True)
    whole = [json.dumps({"time": at, "source": "tiny", "event": "ready", "reason": ""}) for at in (1, 3)]
    (run / "events.jsonl").write_text("\n".join([whole[0], whole[1][:20], whole[1]]))
    assert [event.time for event in ServedEngine(tmp_path).events()] == [1, 3]


def test_leftovers_say_what():
    assert not Leftovers()
    left = Leftovers(("7 python",), (9527,), temporary_files=("tmp1",))
    assert left and str(left) == "processes: 7 python; ports: 9527; temporary files: tmp1"


LEAVES_THINGS = """
import os, pathlib, subprocess, sys, time
port = next(word for word in sys.argv if word.startswith("port=")).removeprefix("port=")
listens = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"
pathlib.Path(os.environ["TMPDIR"], "stays").touch()
subprocess.Popen([sys.executable, "-c", listens, port])
time.sleep(60)
"""


def test_a_process_a_port_and_a_file_that_stay_are_found_and_cleaned_up(tmp_path, monkeypatch):
    monkeypatch.setattr(served, "_LINGER_S", 0.5)
    with ServedEngine(tmp_path, program=[sys.executable, "-c", LEAVES_THINGS]) as server:
        temporary = server.temporary
        until(lambda: _listens(server.port) and len(server.look()) == 2)
        server.process.kill()
        server.process.wait()
        left = server.leftovers(0.0)
        assert len(left.processes) == 1 and left.ports == (server.port,) and left.temporary_files == ("stays",)
    assert not _listens(server.port) and not temporary.exists()


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

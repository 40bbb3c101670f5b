"""A fleet counts as whole by its events, and remains of one are found."""

import json
import socket
import sys

import pytest
from support.waiting import until

from proof.load import served
from proof.load.served import Event, Leftovers, ServedFleet, whole_since

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


def events(text):
    """`time source event reason` a line."""
    return [Event(float(t), s, e, r) for t, s, e, r in (line.split(" ", 3) for line in text.strip().splitlines())]


START = f"""
1 router ready x
2 replica-0 starting x
3 replica-0 ready x
4 router registered {A}
5 replica-1 ready x
6 router registered {B}
"""


def test_whole_from_the_last_registration_on():
    assert whole_since(events(START), 2) == 6.0
    assert whole_since(events(START)[:-1], 2) is None


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("7 replica-0 down x", None),
        ("7 replica-0 stalled x", None),
        ("7 replica-0 draining x", None),
        (f"7 router removed {A}", None),
        ("7 router down x", None),
        (f"7 router down x\n8 router ready x\n9 router registered {A}", None),
        (f"7 router down x\n8 router ready x\n9 router registered {A}\n10 router registered {B}", 10.0),
        (f"7 replica-0 down x\n8 router removed {A}\n9 replica-0 ready x\n10 router registered {A}", 10.0),
        ("7 replica-0 restarting x", 6.0),
        ("7 fleet rolling-restart done", 6.0),
        ("7 router refused http://other: no", 6.0),
    ],
)
def test_what_makes_it_whole_no_more_and_again(after, expected):
    assert whole_since(events(START + after), 2) == expected


def test_a_line_that_a_full_disk_cut_off_hides_no_other(tmp_path):
    run = tmp_path / "runs" / "20260101T000000Z-serve-tiny"
    run.mkdir(parents=True)
    whole = [json.dumps({"time": at, "source": "router", "event": "ready", "reason": ""}) for at in (1, 3)]
    (run / "events.jsonl").write_text("\n".join([whole[0], whole[1][:20], whole[1]]))
    assert [event.time for event in ServedFleet(tmp_path).events()] == [1, 3]


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
    with ServedFleet(tmp_path, program=[sys.executable, "-c", LEAVES_THINGS]) as fleet:
        temporary = fleet.temporary
        until(lambda: _listens(fleet.port) and len(fleet.look()) == 2)
        fleet.process.kill()
        fleet.process.wait()
        left = fleet.leftovers(0.0)
        assert len(left.processes) == 1 and left.ports == (fleet.port,) and left.temporary_files == ("stays",)
    assert not _listens(fleet.port) and not temporary.exists()


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

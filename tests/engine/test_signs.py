"""The loss of one of an engine's processes is detected, and helpers may end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.waiting import until

from kimi_w4a8_eagle3.engine.given_folder import RECEIVED, SENT, file_of
from kimi_w4a8_eagle3.engine.signs import DetokenizerQueue, EngineProcesses

PROGRAM = """
import subprocess, sys
import setproctitle
NAMED = "import setproctitle, time; setproctitle.setproctitle(%r); print(flush=True); time.sleep(100)"
names = ["sglang::scheduler_TP0", "sglang::detokenizer", "a compiler"]
children = [subprocess.Popen([sys.executable, "-c", NAMED % name], stdout=subprocess.PIPE) for name in names]
for child in children:
    child.stdout.readline()
print("ready", flush=True)
for line in sys.stdin:
    child = children[int(line)]
    child.kill()
    print("killed", flush=True)  # without waiting for it, so a zombie is left
"""


def kill(engine, child: int) -> None:
    engine.stdin.write(f"{child}\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "killed\n"


@pytest.fixture
def engine():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        for child in (0, 1, 2):
            kill(process, child)  # and wait for it: with its output closed the program would end and leave the others


@pytest.mark.parametrize(("child", "name"), [(0, "sglang::scheduler_TP0"), (1, "sglang::detokenizer")])
def test_a_killed_process_is_named(engine, child: int, name: str) -> None:
    processes = EngineProcesses(engine.pid)
    assert processes.lost() is None
    kill(engine, child)
    until(lambda: processes.lost() is not None)
    assert processes.lost() == name


def test_a_helper_may_end(engine) -> None:
    processes = EngineProcesses(engine.pid)
    kill(engine, 2)
    time.sleep(0.3)
    assert processes.lost() is None


def test_an_engine_that_has_ended_has_no_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert EngineProcesses(ended.pid).lost() is None


def test_a_stopped_detokenizer_is_named_and_a_running_one_is_not() -> None:
    name = "sglang::detokenizer"
    with subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 60"]) as process:
        try:
            until(lambda: EngineProcesses(os.getpid())._names, 30)
            processes = EngineProcesses(os.getpid())
            assert processes.stopped() is None
            process.send_signal(signal.SIGSTOP)
            until(lambda: processes.stopped() is not None, 15)
            assert processes.stopped().startswith(name) and processes.lost() is None
        finally:
            process.kill()


def test_the_queue_of_a_detokenizer_grows_old_while_nothing_comes_back(tmp_path: Path) -> None:
    def sign(kind: str, pid: int, at: float) -> None:
        path = file_of(tmp_path, pid, kind)
        path.touch()
        os.utime(path, (at, at))

    queue = DetokenizerQueue(tmp_path)
    sign(SENT, 1, 10.0)
    assert queue.age(30.0) == 0.0  # a feature is missing, or the engine is not ready
    sign(RECEIVED, 9, 10.1)
    assert queue.age(40.0) == 0.0 and queue.age(90.0) == 0.0  # idle
    sign(SENT, 2, 90.5)
    assert queue.age(91.0) == 1.0 and queue.age(99.0) == 9.0
    sign(SENT, 1, 99.5)  # more work does not hide that the first is not answered
    assert queue.age(101.0) == 11.0
    sign(RECEIVED, 9, 91.0)  # behind, but it works
    assert queue.age(102.0) == 0.0 and queue.age(104.0) == 2.0
    sign(RECEIVED, 9, 104.5)
    assert queue.age(109.0) == 0.0

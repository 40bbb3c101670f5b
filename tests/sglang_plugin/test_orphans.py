"""A child of an engine ends with its parent, even if the parent ends before the child asks for the signal."""

import os
import subprocess
import sys

import psutil
import pytest
from support.waiting import gone, until

PROGRAM = """
import multiprocessing, os, sys, time

def child(pid, parent_is_gone):
    while parent_is_gone and os.getppid() == pid:
        time.sleep(0.01)
    from kimi_w4a8_eagle3.sglang_plugin.upkeep import orphans
    orphans.end_with_parent()
    print("asked", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(os.getpid(), sys.argv[1] == "before"))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""

SUPERVISED = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""
HANGING = """
import signal, time
from kimi_w4a8_eagle3.sglang_plugin.upkeep import orphans
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphans._GRACE_S = 0.1
orphans.end_with_supervisor()
time.sleep(100)
"""


def test_an_engine_whose_end_hangs_does_not_outlive_its_supervisor_for_long(tmp_path):
    (tmp_path / "owner.lock").touch()
    command = [sys.executable, "-c", SUPERVISED, HANGING]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        engine = psutil.Process(int(supervisor.stdout.readline()))
        try:
            until(lambda: engine.num_threads() >= 2)  # it watches now
            supervisor.kill()
            supervisor.wait()
            assert gone(engine)
        finally:
            if engine.is_running():
                engine.kill()


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_child_does_not_outlive_its_parent(tmp_path, dies):
    script = tmp_path / "parent.py"
    script.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, script, dies], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        if dies == "after":
            assert parent.stdout.readline() == "asked\n"
        parent.kill()
        parent.wait()
        try:
            assert gone(child), "the child lives on"
        finally:
            if child.is_running():
                child.kill()
        assert dies == "after" or parent.stdout.read() == ""

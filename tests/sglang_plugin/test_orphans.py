"""A child of an engine ends with its parent, also when the parent is gone before the child asks for that."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, sys, time

def child(pid, parent_is_gone):
    while parent_is_gone and os.getppid() == pid:
        time.sleep(0.01)
    from kimi_w4a8_eagle3.sglang_plugin import orphans
    orphans.end_with_parent()
    print("asked", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(os.getpid(), sys.argv[1] == "before"))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


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
        end = time.monotonic() + 30
        try:
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < end, "the child lives on"
                time.sleep(0.05)
        except psutil.NoSuchProcess:
            pass
        finally:
            if child.is_running():
                child.send_signal(signal.SIGKILL)
        assert dies == "after" or parent.stdout.read() == ""

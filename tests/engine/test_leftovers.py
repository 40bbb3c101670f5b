"""Temporary folders and shared memory of engines are removed, even if their supervisor was killed."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.engine.leftovers import Belongings, remove_orphans

MAPS_UNTIL_KILLED = """
import mmap, os, sys, time
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
print("mapped", flush=True)
time.sleep(100)
"""
SUPERVISES_UNTIL_KILLED = """
import sys, time
from kimi_w4a8_eagle3.engine.leftovers import Belongings
belongings = Belongings()
belongings.see([int(sys.argv[1])])
print(belongings.folder, flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    """Use a separate temporary folder, because other engines may run on this machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    monkeypatch.undo()
    import tempfile

    tempfile.tempdir = None


def running(program, *arguments):
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


@pytest.fixture
def segment():
    path = Path(f"/dev/shm/kimi-test-{uuid.uuid4().hex}")
    yield path
    path.unlink(missing_ok=True)


def test_what_an_engine_maps_is_removed_after_it_ended(segment):
    engine, _ = running(MAPS_UNTIL_KILLED, str(segment))
    belongings = Belongings()
    belongings.see([engine.pid, 2**22 + 1])  # a process that has ended is no error
    engine.kill()
    engine.wait()
    (belongings.folder / "socket").touch()
    assert segment.exists()
    belongings.remove()
    assert not segment.exists() and not belongings.folder.exists()
    belongings.remove()


def test_orphans_of_a_killed_supervisor_are_removed_at_the_next_start(segment):
    engine, _ = running(MAPS_UNTIL_KILLED, str(segment))
    supervisor, folder = running(SUPERVISES_UNTIL_KILLED, str(engine.pid))
    assert remove_orphans() == []  # it lives
    for process in (engine, supervisor):
        process.kill()
        process.wait()
    assert Path(folder).is_dir() and segment.exists()
    assert remove_orphans() == [Path(folder)]
    assert not Path(folder).exists() and not segment.exists()


def test_an_engine_that_outlives_its_supervisor_keeps_everything_until_it_ended(segment):
    engine, _ = running(MAPS_UNTIL_KILLED, str(segment))
    supervisor, folder = running(SUPERVISES_UNTIL_KILLED, str(engine.pid))
    supervisor.kill()
    supervisor.wait()
    assert remove_orphans() == []
    assert segment.exists() and Path(folder).is_dir()
    engine.kill()
    engine.wait()
    assert remove_orphans() == [Path(folder)]
    assert not segment.exists()


NOTES_AND_DIES = """
import os, signal, sys
from kimi_w4a8_eagle3.engine.given_folder import note
note(sys.argv[1])
open(sys.argv[1], "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_an_engine_made_between_two_looks_is_removed_too(segment):
    belongings = Belongings()
    environment = {**os.environ, "TMPDIR": str(belongings.folder)}
    subprocess.run([sys.executable, "-c", NOTES_AND_DIES, str(segment)], env=environment, check=False)
    assert segment.exists()
    belongings.remove()
    assert not segment.exists()


def test_a_folder_that_another_made_deletes_nothing_of_ours(tmp_path, monkeypatch):
    """Any user can put a folder with our name and a list of our files into /tmp."""
    treasure = tmp_path / "treasure"
    treasure.touch()
    trap = tmp_path / "kimi-trap"
    trap.mkdir()
    (trap / "owner.lock").touch()
    (trap / "shared-memory.txt").write_text(f"{treasure}\n/dev/shm/../{treasure}\n")
    monkeypatch.setattr(os, "getuid", lambda: trap.stat().st_uid + 1)
    assert remove_orphans() == [] and trap.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert remove_orphans() == [trap]  # made by this user: cleared away, but nothing outside /dev/shm
    assert treasure.exists()

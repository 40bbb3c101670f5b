"""Engines as forks: like new processes in all that can be seen of them, and nothing of them outlives anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import supervisor
from support.tiny_servers import tiny_launch
from support.waiting import gone, until

from kimi_w4a8_eagle3.engine.process import Program
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_laptop.fork_server import ForkedProcess, can_fork, fork

pytestmark = [pytest.mark.server, pytest.mark.slow]

ENVIRONMENT = load_recipe("tiny").env


class Portraits:
    """Runs `support.portrait`, forked or new, and reads what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.environ = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder)}

    def program(self, *words: str) -> Program:
        self.count += 1
        self.file = self.folder / f"portrait-{self.count}.json"
        return Program("support.portrait", (str(self.file), *words))

    def fork(self, *words: str, log: Path | None = None, **environ: str) -> ForkedProcess:
        with (log or self.folder / "log").open("ab") as output:
            process = fork(self.program(*words), {**self.environ, **environ}, output.fileno())
        assert process is not None, (self.folder / "log").read_text()
        return process

    def read(self) -> dict[str, dict[str, object]]:
        until(self.file.exists)
        found: dict[str, dict[str, object]] = json.loads(self.file.read_text())
        return found


@pytest.fixture
def portraits(tmp_path: Path) -> Portraits:
    return Portraits(tmp_path)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not [process for process in psutil.Process().children() if process.status() == psutil.STATUS_ZOMBIE]


def test_a_fork_equals_a_new_process(portraits: Portraits) -> None:
    changes = {"KIMI_MAX_MASK_MS": "9", "TMPDIR": str(portraits.folder / "its own")}
    (portraits.folder / "its own").mkdir()
    assert portraits.fork("end", "0", **changes).wait(280) == 0
    forked = portraits.read()
    with (portraits.folder / "log").open("ab") as log:
        subprocess.run(
            portraits.program("end", "0").argv,
            env={**portraits.environ, **changes},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
    new = portraits.read()
    forked["portrait"]["arguments"] = new["portrait"]["arguments"]  # the names of the two files
    assert forked["portrait"] == new["portrait"]
    assert forked["portrait"]["parent"] == os.getpid()
    given = {**portraits.environ, **changes}
    assert {name: forked["environ"].get(name) for name in given} == given


def test_exit_codes_and_signals_are_seen(portraits: Portraits) -> None:
    assert portraits.fork("end", "3").wait(280) == 3
    for end, code in ((ForkedProcess.terminate, -signal.SIGTERM), (ForkedProcess.kill, -signal.SIGKILL)):
        process = portraits.fork("wait")
        portraits.read()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        end(process)
        assert process.wait(280) == code == process.poll()
        end(process)  # its number may be another process's by now


def test_what_is_not_forked() -> None:
    launch = tiny_launch()
    environ = {**os.environ, **launch.env}
    assert can_fork(launch.command, environ)
    assert not can_fork(launch.command, {**environ, "OMP_NUM_THREADS": "2"})
    assert not can_fork(launch.argv, environ)  # a command line, as on a GPU


def test_kill_9_of_a_supervisor_whose_fork_server_imports_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "e2e.test_fork_server", str(tmp_path)]) as killed:
        root = psutil.Process(killed.pid)
        until(root.children)
        importing = root.children(recursive=True)
        killed.kill()
    assert gone(*importing)


def test_kill_9_of_a_supervisor_leaves_nothing(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as log:
        killed = supervisor.forked(["e2e.test_fork_server", str(tmp_path)], tmp_path, os.environ, log.fileno())
    portrait = tmp_path / "portrait-1.json"
    until(portrait.exists)
    assert json.loads(portrait.read_text())["portrait"]["parent"] == killed.pid
    family = psutil.Process(killed.pid).children(recursive=True)
    assert len(family) == 2  # the fork server, too
    killed.kill()
    assert killed.wait(280) == -signal.SIGKILL
    assert gone(*family)


if __name__ == "__main__":  # a supervisor of an engine
    engine = Portraits(Path(sys.argv[1])).fork("wait")
    signal.pause()

"""A program in a process of its own with SGLang and our plugin, for the pinned release and for the newest.

In a process of its own because hooks change SGLang as a whole; a fork of one that has imported the release once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST, SGLANG_PINNED
from kimi_w4a8_eagle3.engine.process import Program
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_laptop import fork_server
from kimi_w4a8_laptop.fork_server import ForkedProcess

VERSIONS = (SGLANG_PINNED, SGLANG_NEWEST)
RELEASES = (False, pytest.param(True, marks=pytest.mark.slow))  # is it the newest?
BOTH = pytest.mark.parametrize("newest", RELEASES, ids=VERSIONS)
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"


def written(program: str, folder: Path, *arguments: str) -> Program:
    """Write the source `program`, and return what runs it and prints into `output` in `folder`."""
    (folder / "program.py").write_text(program)
    files = [str(folder / name) for name in ("program.py", "output")]
    return Program("support.run_program", (*files, *arguments))


@cache
def _environ() -> dict[str, str]:
    """Return the variables of this process at the first call.

    Modules set variables when they are collected, before an engine starts, and some libraries set more during a test.
    With other variables than an engine's, a program would need a fork server of its own.
    """
    return dict(os.environ)


def environment(newest: bool = False, **environ: str) -> dict[str, str]:
    """The variables of an engine of the built-in model, and more."""
    if not newest:
        return {**_environ(), **load_recipe("tiny").env, **environ}
    if not NEWEST.is_dir():
        pytest.fail(f"SGLang {SGLANG_NEWEST} is not installed in {NEWEST}: `make venv` puts it there")
    path = os.pathsep.join([_environ()["PYTHONPATH"], str(NEWEST)])
    return {**environment(), "PYTHONPATH": path, **environ}


def start(program: str, folder: Path, *arguments: str, newest: bool = False, **environ: str) -> ForkedProcess:
    """Begin to run `program` after the plugin was loaded; it writes `output`, `log` and temporary files in `folder`."""
    variables = environment(newest, TMPDIR=str(folder), **environ)
    with (folder / "log").open("ab") as log:
        process = fork_server.fork(written(program, folder, *arguments), variables, log.fileno())
    assert process is not None, (folder / "log").read_text()
    return process


@cache
def run(
    program: str, newest: bool = False, *arguments: str, new: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `program` to its end, with more variables; each program once for all tests of a module.

    new: as a new process, which reads every variable from its beginning.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        if new:
            words = written(program, folder, *arguments).argv
            variables = environment(newest, TMPDIR=name, **environ)
            done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=240, check=False)
            code, log = done.returncode, done.stderr
        else:
            code = start(program, folder, *arguments, newest=newest, **environ).wait(240)
            log = (folder / "log").read_text()
        output = (folder / "output").read_text()
    return subprocess.CompletedProcess(program, code, output, log)


def found(program: str, newest: bool = False, *arguments: str, **environ: str) -> dict[str, Any]:
    """Return the JSON object that `program` prints in its last line."""
    done = run(program, newest, *arguments, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer

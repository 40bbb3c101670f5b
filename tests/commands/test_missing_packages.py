"""Without any extra every command works, or names what is missing and the command that installs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.optional_parts import PARTS
from support.repository import ROOT

from kimi_w4a8_eagle3.base.installed import failed_import
from kimi_w4a8_eagle3.cli import load, verbs
from kimi_w4a8_laptop import tiny

pytestmark = pytest.mark.slow

ADVICE = re.compile(r"pip install -e '\.\[([\w,]+)\]'|`(make venv|make demo)`")
HIDDEN = sorted({*PARTS, "datasets", "torch", "torchvision", "transformers", "amd-quark", "kimi-w4a8-laptop"})
# Hides modules and distributions, then runs each line of argv[2] in a fork: [exit code, output, new files].
PROGRAM = """
import gc, json, os, shlex, sys, tempfile
from importlib.machinery import PathFinder
from pathlib import Path
hidden = set(json.loads(sys.argv[1]))

class Remaining:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if path is None and name in hidden else PathFinder.find_spec(name, path, target)
    @staticmethod
    def find_distributions(context):
        return (one for one in PathFinder.find_distributions(context) if one.name not in hidden)
    invalidate_caches = PathFinder.invalidate_caches

sys.meta_path[sys.meta_path.index(PathFinder)] = Remaining
from kimi_w4a8_eagle3.cli import load, main, verbs
list(map(load, verbs()))  # once for all forks

def called(line):
    before = set(Path().rglob("*"))
    with tempfile.TemporaryFile("w+") as output:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["kimi-w4a8", *shlex.split(line)]
            try:
                main()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read(), sorted(str(path) for path in set(Path().rglob("*")) - before)

gc.freeze()
print(json.dumps([called(line) for line in json.loads(sys.argv[2])]))
"""
DEAD, MODEL = "http://127.0.0.1:9", shlex.quote(str(tiny.target_path()))
# A small real call of each command, and what its message advises: the extras, `make venv` for SGLang, `make demo` for
# the built-in model, or nothing.
CALLS = {
    f"check {MODEL}": "",
    "doctor tiny": "make demo",
    "prepare tiny": "make demo",
    "fetch -r tiny": "",
    "patch --check": "",
    "trust -r tiny": "",
    "recipes": "",
    "serve tiny": "make demo",
    "serve tiny --dry-run": "make demo",
    "ready --port 9 --timeout 0": "",
    "plan agent --gpu mi325x": "",
    "gates": "",
    f"quantize w4a8-target {MODEL} out": "quantize",
    f"quantize fp8-draft {MODEL} out": "quantize",
    "quantize fix-exclude nowhere": "",
    "tune-moe --tokens 2 -o tiles.json": "serve",
    "warm --objects kernels": "serve,kernels",
    **{f"eval {name} --recipe tiny": "eval" for name in ("gsm8k", "tiny-math", "tools", "lossless", "smoke")},
    "bench list": "",
    "bench run tiny-maths --recipe tiny": "make demo",
    f"bench run tiny-maths --base-url {DEAD}": "make venv",
    "bench ab --a tiny --b tiny:plain -w tiny-maths": "make demo",
    "bench sweep --recipe tiny": "make demo",
    "bench compare nowhere": "",
    "bench predict": "",
    "draft collect collected --share 0.1": "",
    "draft erase collected --request none": "",
    "draft states collected --recipe tiny": "serve",
    "draft train collected --recipe tiny --to new": "serve",
    "draft compare collected --recipe tiny --new new": "bench",
    "draft switch link --back": "",
    "accept --quick --recipe tiny": "eval",
    "report nowhere": "",
}
GROUPS = {name: getattr(load(name), "commands", None) for name in verbs()}
COMMANDS = [f"{name} {inner}".strip() for name, found in GROUPS.items() for inner in found or ("",)]


class Called(NamedTuple):
    code: int
    output: str
    written: list[str]

    @property
    def advice(self) -> str:
        return ",".join(dict.fromkeys(filter(None, (part for found in ADVICE.findall(self.output) for part in found))))


def run(lines: list[str], folder: Path) -> dict[str, Called]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hub")}
    words: list[Any] = [sys.executable, "-c", PROGRAM, json.dumps(HIDDEN), json.dumps(lines)]
    options: dict[str, Any] = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 550}
    done = subprocess.run(words, **options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line: Called(*found) for line, found in zip(lines, json.loads(done.stdout), strict=True)}


def test_help_needs_no_extra(tmp_path: Path) -> None:
    found = run([f"{command} --help" for command in COMMANDS], tmp_path)
    assert [line for line, one in found.items() if one.code or "Usage: kimi-w4a8" not in one.output] == []


def test_every_command_works_or_names_the_command_that_helps(tmp_path: Path) -> None:
    assert [command for command in COMMANDS if not any(call.startswith(command) for call in CALLS)] == []
    found = run([*CALLS], tmp_path)
    assert [line for line, one in found.items() if "Traceback" in one.output or one.code not in (0, 1)] == []
    assert {line: one.advice for line, one in found.items()} == CALLS
    stopped = {line: one.written for line, one in found.items() if one.advice and not line.startswith("accept")}
    assert not any(stopped.values()), "a missing package leaves files behind"


def test_a_module_that_no_extra_brings_stays_a_traceback() -> None:
    assert failed_import(ModuleNotFoundError(name="kimi_w4a8_eagle3.misspelt")) is None
    assert failed_import(ModuleNotFoundError()) is None
    assert "'.[bench]'" in str(failed_import(ModuleNotFoundError(name="matplotlib.pyplot")))

"""Every command works or names what is missing and the command that installs it, whatever extras are installed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.repository import ROOT

from kimi_w4a8_eagle3.base.installed import failed_import
from kimi_w4a8_eagle3.base.run_dir import RECORD, record, write_json
from kimi_w4a8_lab.base.experiment import RESULT
from kimi_w4a8_lab.speed.generator import LoadResult
from kimi_w4a8_lab.speed.measure import Measurement
from kimi_w4a8_lab.speed.runs import RunResult
from kimi_w4a8_lab.speed.workloads import load_workload
from kimi_w4a8_laptop import tiny

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("verbs.py")
INSTALLATIONS = {"": set(), "all": {"all", "serve", "bench", "scale", "eval"}}
ADVICE = re.compile(r"pip install '\.\[([\w,]+)\]'|`(make venv|make demo)`")

DEAD = "http://127.0.0.1:9"
# A small real call of each command, and what its message advises where no extra is installed: the extras, `make venv`
# for SGLang, `make demo` for the built-in model, or nothing. MODEL becomes the built-in checkpoint, PORT a
# port that is taken.
CALLS = {
    "check MODEL": "",
    "doctor tiny": "make demo",
    "fetch -r tiny": "",
    "patch --check": "",
    "trust -r tiny": "",
    "recipes": "",
    "serve tiny": "make demo",
    "serve tiny --replicas 2": "make demo",
    "serve tiny --dry-run": "make demo",
    f"chat hello --base-url {DEAD}": "",
    f"route -w {DEAD} --port PORT": "scale",
    "plan agent --gpu mi325x": "",
    "plan agent --gpu mi325x -o plan.svg": "bench",
    "gates": "",
    "quantize w4a8-target MODEL out": "quantize",
    "quantize fp8-draft MODEL out": "quantize",
    "quantize fix-exclude nowhere": "",
    "tune-moe --tokens 2 -o tiles.json": "serve",
    "warm --objects kernels": "serve,kernels",
    **{f"eval {name} --recipe tiny": "eval" for name in ("gsm8k", "tiny-math", "tools", "lossless", "smoke")},
    "bench list": "",
    "bench run tiny-maths --recipe tiny": "make venv",
    f"bench run tiny-maths --base-url {DEAD}": "make venv",
    "bench ab --a tiny --b tiny:plain -w tiny-maths": "make demo",
    "bench sweep -r tiny -w tiny-1k1k": "make demo",
    "bench sweep -r tiny -w tiny-1k1k --print": "",
    "bench compare measured": "",
    "bench predict": "",
    "draft collect collected --share 0.1": "",
    "draft erase collected --request none": "",
    "draft states collected --recipe tiny": "serve",
    "draft train collected --recipe tiny --to new": "serve",
    "draft compare collected --recipe tiny --new new": "bench",
    "draft switch link --back": "",
    "accept --quick --recipe tiny": "eval",
    "report measured -o page": "bench",
}


@dataclass(frozen=True)
class Called:
    """Exit code and output of a command."""

    words: list[str]
    code: int
    output: str
    written: list[str]

    @property
    def advice(self) -> str:
        """The extras that it advises to install, or the target of make."""
        return ",".join(dict.fromkeys(filter(None, (part for found in ADVICE.findall(self.output) for part in found))))


@dataclass(frozen=True)
class Walk:
    """Every command, its help, and the calls, where only some extras are installed."""

    extras: str
    paths: list[list[str]]
    helps: list[Called]
    calls: list[Called]


@pytest.fixture(scope="module", params=INSTALLATIONS, ids=lambda extras: extras or "nothing")
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    extras, folder = str(request.param), tmp_path_factory.mktemp("walk")
    measured(folder / "measured")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hub")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"MODEL": str(tiny.target_path()), "PORT": str(taken.getsockname()[1])}
        calls = [[values.get(word, word) for word in call.split(" ")] for call in CALLS]
        done = subprocess.run(
            [sys.executable, PROGRAM, extras, json.dumps(calls)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=550,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return Walk(extras, found["paths"], *([Called(*one) for one in found[name]] for name in ("helps", "calls")))


def measured(folder: Path) -> None:
    """Write a finished benchmark run with one measurement."""
    folder.mkdir()
    load = LoadResult.model_validate(dict.fromkeys(LoadResult.model_fields, 1))
    work = load_workload("tiny-con2")
    one = Measurement(
        side="tiny", workload=work, concurrency=2, num_prompts=1, seed=1, started="", raw="", command=[], load=load
    )
    result = RunResult(kind="bench", status="complete", sides=["tiny"], measurements=[one])
    write_json(folder / RESULT, result.model_dump(mode="json"))
    write_json(folder / RECORD, record("bench", {}, {}, hardware={"known": True, "gpus": []}))


def test_every_command_is_called(walk: Walk) -> None:
    groups = {path[0] for path in walk.paths if len(path) == 2}
    commands = {tuple(path) for path in walk.paths if len(path) == 2 or path[0] not in groups}
    assert {tuple(words[: 1 + (words[0] in groups)]) for words in map(str.split, CALLS)} == commands


def test_help_needs_no_extra(walk: Walk) -> None:
    assert [one for one in walk.helps if one.code != 0 or "Usage: kimi-w4a8" not in one.output] == []


def test_no_command_ends_in_a_traceback(walk: Walk) -> None:
    assert [one for one in walk.calls if "Traceback" in one.output or one.code not in (0, 1)] == []


def test_a_message_never_advises_what_is_installed(walk: Walk) -> None:
    installed = INSTALLATIONS[walk.extras]
    assert [one for one in walk.calls if set(one.advice.split(",")) & installed] == []


def test_the_message_names_the_command_that_helps(walk: Walk) -> None:
    if walk.extras:
        return  # then others are missing, or none
    assert {call: one.advice for call, one in zip(CALLS, walk.calls, strict=True)} == CALLS


def test_what_a_missing_package_stops_has_written_nothing(walk: Walk) -> None:
    stopped = [one for one in walk.calls if one.advice and one.words[0] != "accept"]  # it records its stages
    assert stopped and [one for one in stopped if one.written] == []


def test_a_module_that_no_extra_brings_stays_a_traceback() -> None:
    assert failed_import(ModuleNotFoundError(name="kimi_w4a8_eagle3.misspelt")) is None
    assert failed_import(ModuleNotFoundError()) is None
    assert "'.[bench]'" in str(failed_import(ModuleNotFoundError(name="matplotlib.pyplot")))

"""The doctor on the machine that runs the tests, through the command line and through the real probe."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.doctor.probe import Probe
from kimi_w4a8_eagle3.engine.process import free_port


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.mark.skipif(find_spec("sglang") is None or find_spec("torch") is None, reason="the engine is not installed")
def test_tiny_is_ready_here():
    code, output = doctor("--recipe", "tiny", "--port", str(free_port()))
    assert code == 0, output
    assert "recipe tiny: ready" in output and "runs on a CPU" in output


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine has an AMD GPU")
def test_without_a_gpu_the_large_recipe_is_refused_with_reasons(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no question to the outside
    code, output = doctor("--json")
    report = json.loads(output)
    assert code == 1 and report["verdict"] == "fail" and report["recipe"] == "agent"
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["gpus"]["severity"] == "fail" and "8 x gfx942 needed" in checks["gpus"]["found"]
    assert "--recipe tiny" in checks["gpus"]["remedy"]
    assert sum(report["counts"].values()) == len(report["checks"])


def test_a_taken_port_fails_and_the_exit_code_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, output = doctor("--recipe", "tiny", "--port", str(taken.getsockname()[1]))
    assert code == 1 and "fail  port" in output and "recipe tiny: not ready" in output


def test_the_real_probe(tmp_path):
    probe = Probe()
    assert probe.read("proc/sys/kernel/osrelease") and probe.read("no/such/file") is None
    assert probe.usable("dev/null") and probe.group_of("dev/null") == "root"
    total, free = probe.space(tmp_path / "not" / "yet")
    assert 0 < free <= total
    assert probe.package("no-such-distribution", "pytest") == pytest.__version__
    assert probe.package("no-such-distribution") is None
    assert "kimi_w4a8_eagle3" in probe.plugins()
    others = {process.pid: process for process in probe.processes()}
    assert os.getpid() not in others and others[os.getppid()].owner == probe.user()
    assert [patch.name for patch in probe.patches()]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("hip: Optional[str] = '7.2.53211'\ncuda: Optional[str] = None\n", "hip 7.2.53211"),
        ("cuda: Optional[str] = '12.8'\nhip = None\n", "cuda 12.8"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
    ],
)
def test_torchs_build_is_read_without_importing_it(tmp_path, monkeypatch, text, build):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert Probe().torch_build() == build

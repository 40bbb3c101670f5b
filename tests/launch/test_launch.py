from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.loopback import answering
from support.repository import ROOT


def test_scripts_have_no_shell_error_and_may_be_run() -> None:
    for script in (path for folder in ("launch", "requirements", ".ci") for path in (ROOT / folder).rglob("*")):
        if script.is_file() and script.read_bytes()[:11] == b"#!/usr/bin/":
            assert os.access(script, os.X_OK) or script.suffix == ".sbatch", script
            if b"bash" in script.read_bytes().splitlines()[0]:
                subprocess.run(["bash", "-n", script], check=True)


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "launch/docker" / name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_healthcheck(status: int, code: int) -> None:
    with answering(lambda path, _: (status if path == "/live" else 404, b"")) as url:
        assert run_script("healthcheck.py", HEALTHCHECK_URL=f"{url}/live").returncode == code
    result = run_script("healthcheck.py", HEALTHCHECK_URL=f"{url}/live")  # the port is closed
    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def distribution(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: more"]
    (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")


def test_check_closure(tmp_path: Path) -> None:
    distribution(tmp_path, "top", "1.0", "middle>=2", 'absent; extra == "more"', 'other; python_version < "3"')
    distribution(tmp_path, "middle", "2.1", "leaf<1")
    distribution(tmp_path, "leaf", "0.9")
    good = run_script("check_closure.py", "top", PYTHONPATH=str(tmp_path))
    assert good.returncode == 0, good.stdout
    more = run_script("check_closure.py", "top[more]", PYTHONPATH=str(tmp_path))
    assert more.returncode == 1
    assert "absent" in more.stdout
    shutil.rmtree(tmp_path / "leaf-0.9.dist-info")
    distribution(tmp_path, "leaf", "1.5")
    old = run_script("check_closure.py", "top", PYTHONPATH=str(tmp_path))
    assert old.returncode == 1
    assert "leaf<1 (for middle), but 1.5 is installed" in old.stdout


def test_the_entry_point_that_sglang_reads() -> None:
    names = {entry.name: entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")}
    assert names["kimi_w4a8_eagle3"] == "kimi_w4a8_eagle3.sglang_plugin:register"

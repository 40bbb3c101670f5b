"""launch/slurm/kimi.sbatch without Slurm: its settings and its command lines. With Slurm: launch/slurm/check.sh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from support.repository import ROOT

from kimi_w4a8_eagle3.cli import app

SCRIPT = ROOT / "launch/slurm/kimi.sbatch"


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={**inherited, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def command_lines() -> list[list[str]]:
    """The `kimi-w4a8` command lines of the script, its variables filled in."""
    values = {
        "RECIPE": "eagle3-opt",
        "DRAIN_TIMEOUT": "120",
        "address": "10.0.0.1",
        "port": "9537",
        "OPS_HOST": "127.0.0.1",
    }
    text = SCRIPT.read_text().replace("\\\n", " ")
    text = re.sub(r'"\$\(address_of [^)]*\)"', "10.0.0.1", text)
    found = re.findall(r'"\$KIMI" (serve .*?) &$', text, re.MULTILINE)
    return [shlex.split(re.sub(r"\$(\w+)", lambda name: values[name[1]], line)) for line in found]


def test_the_command_lines_are_ours() -> None:
    group = typer.main.get_command(app)
    lines = command_lines()
    assert [line[0] for line in lines] == ["serve"]
    for line in lines:
        with group.make_context("kimi", list(line)) as context:
            name, command, rest = group.resolve_command(context, line)  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=context)


def test_a_job_without_a_key_ends_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode != 0 and "KIMI_API_KEY_FILE" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, KIMI_API_KEY_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 2 and "cannot read the key file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_key_is_in_the_script() -> None:
    assert not [line for line in SCRIPT.read_text().splitlines() if "--api-key" in line]


@pytest.mark.parametrize("option", ["--no-kill", "--exclusive", "--gpus-per-node=8", "--signal=B:TERM@240"])
def test_slurm_is_asked_for(option: str) -> None:
    assert f"#SBATCH {option}" in SCRIPT.read_text().splitlines()


def test_the_time_before_the_limit_covers_the_drain() -> None:
    text = SCRIPT.read_text()
    before = re.search(r"B:TERM@(\d+)", text)
    drain = re.search(r"DRAIN_TIMEOUT:-(\d+)", text)
    assert before is not None and drain is not None
    # Slurm may signal up to a minute late; the router drains after the replicas, then without requests.
    assert int(before[1]) >= 60 + int(drain[1]) + 30

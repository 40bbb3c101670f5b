"""launch/slurm/kimi.sbatch without Slurm: its settings and its command lines. With Slurm: launch/slurm/check.sh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import typer
from smg.launch_router import parse_router_args
from support.repository import ROOT

from kimi_w4a8_eagle3.cli import app

SCRIPT = ROOT / "launch/slurm/kimi.sbatch"
TEXT = SCRIPT.read_text()


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    environment = {**inherited, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT)], env=environment, cwd=folder, capture_output=True, text=True, timeout=60
    )


def command_line(program: str) -> list[str]:
    """A command line of the script, its variables filled in."""
    values = {"RECIPE": "eagle3-opt", "DRAIN_TIMEOUT": "120", "OPS_HOST": "127.0.0.1", "address": "10.0.0.1"}
    text = TEXT.replace("\\\n", " ").replace('"${workers[@]}"', "http://10.0.0.1:9537 http://10.0.0.2:9537")
    text = re.sub(r'"\$\(address_of [^)]*\)"', "10.0.0.1", text).replace("$((SMG_PORT + 1))", "9528")
    (line,) = re.findall(rf'"\${program}" (.*) &$', text, re.MULTILINE)
    return shlex.split(re.sub(r"\$(\w+)", lambda name: values.get(name[1], "9527"), line))


def test_the_servers_and_smg_are_started_by_lines_that_they_know() -> None:
    verb, *words = command_line("KIMI")
    group = typer.main.get_command(app)
    with group.make_context("kimi", [verb, *words]) as context:
        name, command, rest = group.resolve_command(context, [verb, *words])  # type: ignore[attr-defined]
        assert name == "serve"
        command.make_context(name, rest, parent=context)
    launch, *words = command_line("SMG")
    options = parse_router_args(words)
    assert launch == "launch" and options.worker_urls == ["http://10.0.0.1:9537", "http://10.0.0.2:9537"]
    assert (options.policy, options.health_check_endpoint) == ("cache_aware", "/ready")
    assert options.control_plane_api_keys and options.shutdown_grace_period_secs == 120


def test_a_job_without_a_readable_key_ends_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode != 0 and "KIMI_API_KEY_FILE" in done.stderr
    done = run(tmp_path, KIMI_API_KEY_FILE=str(tmp_path / "nothing"))
    assert done.returncode == 2 and "cannot read the key file" in done.stderr
    assert not list(tmp_path.iterdir()) and "--api-key " not in TEXT


def test_slurm_is_asked_for_whole_nodes_and_for_time_to_drain() -> None:
    asked = {line.removeprefix("#SBATCH ") for line in TEXT.splitlines() if line.startswith("#SBATCH")}
    assert {"--no-kill", "--exclusive", "--gpus-per-node=8", "--signal=B:TERM@240"} <= asked
    (before,), (drain,) = re.findall(r"B:TERM@(\d+)", TEXT), re.findall(r"DRAIN_TIMEOUT:-(\d+)", TEXT)
    # Slurm may signal up to a minute late; smg drains after the servers, then without requests.
    assert int(before) >= 60 + int(drain) + 30

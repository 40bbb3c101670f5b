"""The Triton kernels of the MoE layer and of the draw, executed on the CPU by Triton's interpreter in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CASES = {"moe/triton/triton_interpreted.py": 52, "sampling/draw_interpreted.py": 7}


@pytest.mark.slow
def test_the_program_for_a_gpu_runs_whole() -> None:
    command = [sys.executable, "-m", "proof.on_gpu", "--small"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [re.findall(r"[^|]+", line.replace(" ", "")) for line in run.stdout.splitlines() if line.startswith("| ")]
    assert [row[:3] for row in found if row[0] in ("INT4", "MXFP4")][:2] == [["INT4", "1", "1"], ["MXFP4", "1", "1"]]
    assert [row[1:] for row in found if "of2" in row[-2]] == [["2", "2of2", "True"]] * 4
    assert ["1", "True"] in found and found[-1][:2] == ["64", "28"]


@pytest.mark.slow
def test_the_kernels_meet_their_definitions_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None and int(found[1]) >= sum(CASES.values()), run.stdout

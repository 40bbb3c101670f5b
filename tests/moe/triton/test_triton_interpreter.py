"""The Triton kernels, executed on the CPU by Triton's interpreter (cases: triton_interpreted.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("triton_interpreted.py")


def test_the_kernels_meet_the_contract_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None and int(found[1]) >= 47, run.stdout

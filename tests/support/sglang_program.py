"""A program in a process of its own with SGLang and our plugin, for the pinned release and for the newest.

In a process of its own because hooks change SGLang as a whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kimi_w4a8_eagle3
from kimi_w4a8_eagle3.doctor.software import SGLANG_NEWEST, SGLANG_PINNED

VERSIONS = (SGLANG_PINNED, SGLANG_NEWEST)
BOTH = pytest.mark.parametrize("newest", [False, True], ids=VERSIONS)
ROOT = Path(kimi_w4a8_eagle3.__file__).parents[1]
NEWEST = Path(sys.prefix) / "compat" / f"sglang-{SGLANG_NEWEST}"
PRELUDE = """
from kimi_w4a8_eagle3.sglang_plugin import cpu
cpu.install()
from sglang.srt.plugins import load_plugins
load_plugins()
"""


def python_path(newest: bool) -> str:
    """PYTHONPATH of a process with this package and one of the releases."""
    if newest and not NEWEST.is_dir():
        pytest.fail(f"SGLang {SGLANG_NEWEST} is not installed in {NEWEST}: `make venv` puts it there")
    return os.pathsep.join([str(ROOT)] + ([str(NEWEST)] if newest else []))


@cache
def run(program: str, newest: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `program` after the plugin was loaded, with more variables; each program once for all tests of a module."""
    extra = {"PYTHONPATH": python_path(newest), "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "kimi_w4a8_eagle3"}
    command = [sys.executable, "-c", PRELUDE + program]
    everything = {**os.environ, **extra, **environ}
    return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=240, check=False)


def found(program: str, newest: bool = False, **environ: str) -> dict[str, Any]:
    """What `program` prints in its last line, a JSON object."""
    done = run(program, newest, **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer

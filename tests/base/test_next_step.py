"""The commands that messages name run as they stand, from the shell that started the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kimi_w4a8_eagle3 import __version__
from kimi_w4a8_eagle3.base.installed import not_installed
from kimi_w4a8_eagle3.base.next_step import command, pip_install

BIN = Path(sys.executable).parent
CHECKOUT = BIN.parents[1]


def typed(line: str, folder: Path) -> str:
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("on_path", [True, False])
def test_a_next_step_runs_as_it_is_printed(on_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment on the PATH, `kimi-w4a8` is not found, and `pip` may be of another Python."""
    monkeypatch.setenv("PATH", f"{BIN}:/usr/bin:/bin" if on_path else "/usr/bin:/bin")
    monkeypatch.chdir(CHECKOUT)
    assert typed(f"{command()} --version", CHECKOUT).strip() == __version__
    said = typed(f"{pip_install().removesuffix('install')} --version", CHECKOUT)  # pip 26.3 from FOLDER (python 3.11)
    assert Path(said.partition(" from ")[2].rpartition(" (")[0]).resolve().is_relative_to(BIN.parent.resolve())
    near = BIN.relative_to(CHECKOUT)
    pip = "pip" if on_path else f"{near}/{Path(sys.executable).name} -m pip"
    short = ("kimi-w4a8" if on_path else f"{near}/kimi-w4a8", f"{pip} install")
    assert (command(), pip_install()) == short
    assert not_installed(["matplotlib"]).remedy == f"in a checkout of this package: {short[1]} -e '.[bench]'"

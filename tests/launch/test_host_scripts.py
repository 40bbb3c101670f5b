"""bench/*.sh and eval/gsm8k.sh on a host with `kimi-w4a8`, and on one that has the image only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.repository import ROOT

HERE = ["--base-url", "http://127.0.0.1:9527"]
CASES = [
    (["bench/con2.sh"], ["bench", "con2", *HERE]),
    (["bench/con40.sh", "--seed", "2"], ["bench", "con40", *HERE, "--seed", "2"]),
    (["bench/con40.sh", "--base-url", "http://h:1"], ["bench", "con40", "--base-url", "http://h:1"]),
    (["bench/con2.sh", "--recipe", "tiny"], ["bench", "con2", "--recipe", "tiny"]),
    (["eval/gsm8k.sh"], ["eval", "gsm8k", *HERE]),
    (["eval/gsm8k.sh", "--limit", "5"], ["eval", "gsm8k", *HERE, "--limit", "5"]),
    (["eval/gsm8k.sh", "http://h:1", "--limit", "5"], ["eval", "gsm8k", "--base-url", "http://h:1", "--limit", "5"]),
]


@pytest.mark.parametrize("program", ["kimi-w4a8", "docker"])
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_what_is_run(program: str, words: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    file = tmp_path / "bin" / program
    file.write_text(f'#!/bin/sh\n[ "$1" = image ] && exec echo sha256:0123\nprintf "%s\\n" "$@" >{tmp_path}/called\n')
    file.chmod(0o755)
    settings = {name: f"{tmp_path}/{name.lower()}" for name in ("MODELS", "RUNS", "CONFIG", "DEV", "HOME")}
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    done = subprocess.run(
        [ROOT / words[0], *words[1:]], env={"PATH": path, **settings}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    called = (tmp_path / "called").read_text().splitlines()
    assert called[-len(expected) :] == expected and (program == "kimi-w4a8") == (called == expected)
    assert os.access(ROOT / words[0], os.X_OK)

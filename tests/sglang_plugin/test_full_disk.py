"""A process whose log is on a full disk (/dev/full) keeps running."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
{install}
print("x" * 200_000, flush=True)
sys.stderr.write("progress 10%\\r")
sys.stderr.flush()
sys.stdout.writelines(["a\\n", "b\\n"])
warnings.warn("odd")
assert sys.stdout.fileno() == 1 and not sys.stdout.isatty()
open(sys.argv[1], "w").write("reached the end")
"""
INSTALL = "from kimi_w4a8_eagle3.sglang_plugin.upkeep import full_disk; full_disk.install(); full_disk.install()"


def run(install, output, folder):
    end = folder / "end"
    with Path(output).open("w") as file:
        code = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(install=install), str(end)], stdout=file, stderr=file, timeout=60
        ).returncode
    return code, end.exists()


def test_writes_that_fail_are_dropped(tmp_path):
    code, finished = run("pass", "/dev/full", tmp_path)  # without the plugin the first write ends the process
    assert code != 0 and not finished  # 120 in place of 1 where Python cannot flush its buffers at exit
    assert run(INSTALL, "/dev/full", tmp_path) == (0, True)


@pytest.mark.parametrize("install", ["pass", INSTALL], ids=["plain", "tolerant"])
def test_with_space_everything_is_written(tmp_path, install):
    log = tmp_path / "log"
    assert run(install, log, tmp_path) == (0, True)
    text = log.read_text()
    assert text.count("x") >= 200_000 and "progress 10%" in text and "a\nb\n" in text and "odd" in text

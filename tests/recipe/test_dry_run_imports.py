"""From a command line to the command of the engine, few of our modules are read."""

from __future__ import annotations

import subprocess
import sys

MODULES, LINES = 37, 3_590
PROGRAM = """
import contextlib, io, sys
from pathlib import Path
from kimi_w4a8_eagle3 import cli

sys.argv[1:] = ["serve", "agent", "--dry-run"]
quiet = io.StringIO()
with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
    cli.main()
names = [name for name in sys.modules if name.startswith("kimi_w4a8_")]
print(*names, sum(len(Path(sys.modules[name].__file__).read_text().splitlines()) for name in names))
"""


def test_a_dry_run_reads_the_recipe_and_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    *names, lines = done.stdout.split()
    rooms = {name.split(".")[1] for name in names if name.count(".") >= 1 and name.startswith("kimi_w4a8_eagle3.")}
    assert rooms == {"base", "cli", "commands", "gates", "gateway", "machine", "quark", "recipe"}
    assert len(names) <= MODULES and int(lines) <= LINES

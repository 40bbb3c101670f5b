"""Run in a fork that has imported SGLang, or as a new process: loads the plugin, then runs a program.

`python -m ... support.run_program PROGRAM OUTPUT ARGS`: two files, and the program's own arguments.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from kimi_w4a8_laptop.lean_imports import lean_imports

if __name__ == "__main__":
    file, output, *sys.argv[1:] = sys.argv[1:]
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), sys.stdout.fileno())
    with nullcontext() if "sglang.srt.plugins" in sys.modules else lean_imports():  # a new process, as an engine does
        from sglang.srt.plugins import load_plugins

        load_plugins()
    exec(compile(Path(file).read_text(), file, "exec"), {"__name__": "__main__"})

"""The way from `kimi-w4a8 serve tiny` to the start of its engine goes through few files.

A file is entered when one of its functions is called, in any thread. What runs during an import does not count.
The real command runs. Only the start of the engine's process is replaced, where `subprocess.Popen` is called.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kimi_w4a8_eagle3.engine.process import free_port

PACKAGE = Path(__file__).parents[2] / "kimi_w4a8_eagle3"
MOST = 29
PROGRAM = """
import json, os, subprocess, sys, threading
from pathlib import Path
package, words = sys.argv[1] + "/", sys.argv[2:]
entered = {}

def importing(frame):
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    return frame is not None

def follow(frame, event, _):
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(package) and path not in entered and not importing(frame):
        entered[path] = frame.f_code.co_qualname

def started(*_, **__):
    sys.setprofile(None)
    Path("walk.json").write_text(json.dumps({path.removeprefix(package): name for path, name in entered.items()}))
    os._exit(0)

from kimi_w4a8_eagle3 import cli
sys.argv = ["kimi-w4a8", *words]
real = subprocess.Popen
subprocess.Popen = lambda words, *a, **k: real(words, *a, **k) if words[0] != sys.executable else started()
threading.setprofile(follow)
sys.setprofile(follow)
cli.main()
"""


def test_the_way_in_is_short(tmp_path: Path) -> None:
    words = ["serve", "tiny", "--port", str(free_port()), "--ops-port", str(free_port())]
    argv = [sys.executable, "-c", PROGRAM, str(PACKAGE), *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "walk.json").exists(), done.stderr
    entered: dict[str, str] = json.loads((tmp_path / "walk.json").read_text())
    assert {"cli.py", "commands/serve.py", "engine/process.py"} <= entered.keys()  # from the first to the last
    assert len(entered) <= MOST, "\n".join(f"{path}: {name}" for path, name in entered.items())

"""The way from `kimi-w4a8 serve RECIPE` to its first process is short to read.

The spine is the modules that have a function on the stack when the process starts. A room is a module that the spine
calls, once for each pair of caller and callee. A return is such a call into a room that was entered before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kimi_w4a8_eagle3.engine.process import free_port

PACKAGE = Path(__file__).parents[2] / "kimi_w4a8_eagle3"
SPINE = ("commands/serve", "fleet/serve", "fleet/replica", "engine/process")
PROGRAM = """
import json, os, subprocess, sys, threading
from pathlib import Path
package, spine, words = sys.argv[1] + "/", sys.argv[2].split(), sys.argv[3:]
calls = {}

def room(frame):
    path = frame.f_code.co_filename
    return path.removeprefix(package).removesuffix(".py") if path.startswith(package) else ""

def follow(frame, event, _):
    caller = frame.f_back
    if event != "call" or not room(frame) or "__qualname__" in frame.f_locals or frame.f_code.co_name == "<module>":
        return
    while caller is not None and not room(caller):
        if caller.f_code.co_name == "_find_and_load" or "/kimi_w4a8_laptop/" in caller.f_code.co_filename:
            return  # an import, or the starter of another distribution
        caller = caller.f_back
    if caller is not None and room(caller) in spine and caller.f_code.co_name != "<module>":
        calls[room(caller), caller.f_code.co_name, room(frame), frame.f_code.co_qualname] = None

def started(*_, **__):
    sys.setprofile(None)
    Path("walk.json").write_text(json.dumps(list(calls)))
    os._exit(0)

from kimi_w4a8_eagle3 import cli
sys.argv = ["kimi-w4a8", *words]
real = subprocess.Popen
subprocess.Popen = lambda words, *a, **k: real(words, *a, **k) if words[0] != sys.executable else started()
sys.setprofile(follow)
cli.main()
"""


def test_the_way_in_is_short(tmp_path: Path) -> None:
    words = ["serve", "tiny", "--port", str(free_port()), "--ops-port", str(free_port())]
    argv = [sys.executable, "-c", PROGRAM, str(PACKAGE), " ".join(SPINE), *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "walk.json").exists(), done.stderr
    entered = [SPINE[0]]
    returns = []
    for caller, function, room, callee in json.loads((tmp_path / "walk.json").read_text()):
        if room == caller:
            continue
        if room in entered:
            returns.append(f"{caller} {function} -> {room} {callee}")
        else:
            entered.append(room)
    assert len(entered) <= 12, " ".join(entered)
    assert len(returns) <= 8, returns

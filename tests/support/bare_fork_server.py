"""The fork server without its imports, for tests of what starts, replaces and ends fork servers."""

import socket
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType

from kimi_w4a8_eagle3.sglang_plugin.run_module import run
from kimi_w4a8_laptop import forked_engine

if __name__ == "__main__":
    vars(forked_engine).update(_MODULES=(), lean_imports=nullcontext)
    sys.modules["sglang.srt.plugins.hook_registry"] = ModuleType("hook_registry")
    program = forked_engine.serve(socket.socket(fileno=int(sys.argv[1])))
    forked_engine.run_to_end(partial(run, program.module, program.arguments))

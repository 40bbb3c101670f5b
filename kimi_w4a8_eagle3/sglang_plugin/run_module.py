"""`python -m kimi_w4a8_eagle3.sglang_plugin.launch_cpu ARGS`: sglang.launch_server on a machine without a GPU.

SGLang imports its CPU operators before it loads plugins, so they must be in place earlier. Every process of the
server is spawned, and a spawned child imports this module again (as `__mp_main__`) before it unpickles its work:
installing at import time therefore covers them all.
"""

from __future__ import annotations

from kimi_w4a8_eagle3.sglang_plugin import cpu

cpu.install()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")

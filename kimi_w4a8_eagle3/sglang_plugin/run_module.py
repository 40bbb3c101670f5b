"""`python -m kimi_w4a8_eagle3.sglang_plugin.run_module MODULE ARGS`: run one of SGLang's programs without a GPU.

Used for `sglang.launch_server` and `sglang.benchmark.serving`. SGLang imports its CPU operators before it loads
plugins, so this module installs ours at its own import. A child that the server spawns imports this module again (as
`__mp_main__`) before it unpickles its work, so it gets them too. A forked child inherits them.

`--fork-server FD` in place of MODULE is internal: see `forked_engine`.
"""

from __future__ import annotations

import sys

from kimi_w4a8_eagle3.sglang_plugin import cpu, full_disk, orphans

orphans.end_with_parent(spawning=__name__ == "__mp_main__")
full_disk.install()
cpu.install()

_OURS = "kimi_w4a8_eagle3.sglang_plugin."
_WITHOUT_MODEL = ("sglang.benchmark.", f"{_OURS}bench_", f"{_OURS}check_arguments")


def run(words: list[str]) -> None:
    """Run the program `words[0]` in this process, with the remaining words as its arguments."""
    import runpy  # a spawned child of an engine imports this module and does not need it

    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    import socket
    from functools import partial

    from kimi_w4a8_eagle3.engine.fork_server import OPTION

    if len(sys.argv) < 2:
        sys.exit("usage: python -m kimi_w4a8_eagle3.sglang_plugin.run_module MODULE [ARGS...]")
    words = sys.argv[1:]
    if words[0] == OPTION:
        from kimi_w4a8_eagle3.sglang_plugin import forked_engine

        words = forked_engine.serve(socket.socket(fileno=int(words[1])))
        forked_engine.run_to_end(partial(run, words))
    elif words[0].startswith(_WITHOUT_MODEL):
        from kimi_w4a8_eagle3.sglang_plugin.lean_imports import lean_imports

        with lean_imports():
            run(words)
    else:
        run(words)

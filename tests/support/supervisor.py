"""A program that supervises engines, `kimi-w4a8` above all, as a fork that has imported SGLang and has its fork server.

So a test that is not about the first seconds of `kimi-w4a8 serve` waits for none of them. From its first line on the
program is what a new process would be, and everything that ends processes is its own.

Run as `python -m ... support.supervisor FOLDER MODULE ARGS`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import setproctitle

from kimi_w4a8_eagle3.engine.process import Program, die_with_parent
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_laptop import fork_server
from kimi_w4a8_laptop.fork_server import ForkedProcess, ForkServer
from proof.load.served import ServedEngine

KIMI = "kimi_w4a8_eagle3.cli"


def forked(words: Sequence[str], folder: Path, environ: Mapping[str, str], log: int) -> ForkedProcess:
    """The program `words[0]`, a module, with its arguments, in `folder`."""
    program = Program("support.supervisor", (str(folder), *words))
    process = fork_server.fork(program, {**environ, **load_recipe("tiny").env}, log)
    assert process is not None
    return process


class ForkedEngine(ServedEngine):
    """`kimi-w4a8 serve` without its first ten seconds of imports."""

    def _begin(self, environ: dict[str, str], output: BinaryIO) -> ForkedProcess:
        return forked([KIMI, *self.words], self.folder, environ, output.fileno())


def main(folder: str, *words: str) -> None:
    """In the fork: fork its fork server, with the variables of an engine of the built-in model; become the program."""
    # They import SGLang, which nothing else does that imports this module.
    from kimi_w4a8_eagle3.sglang_plugin.run_module import run
    from kimi_w4a8_laptop import forked_engine

    os.chdir(folder)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        control.close()
        os.setsid()
        die_with_parent()
        setproctitle.setproctitle(" ".join(Program(fork_server.FORK_SERVER).argv))
        engine = forked_engine.serve(theirs)  # returns in each engine
        run(engine.module, engine.arguments)
        return
    theirs.close()
    server = ForkServer(ForkedProcess(pid), control)
    fork_server._servers[fork_server.setting(os.environ)] = server
    run(words[0], words[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Program of the fork server for engines on a CPU: it imports SGLang once and forks every engine from itself.

The server has one thread and computes nothing, so a fork of it is as good as a new process. `_become_engine` resets
what an engine must not inherit. The supervisor's side is `fork_server.py`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import setproctitle
from huggingface_hub import constants

from kimi_w4a8_eagle3.engine.process import Program, die_with_parent
from kimi_w4a8_eagle3.sglang_plugin.run_module import run
from kimi_w4a8_eagle3.sglang_plugin.upkeep import orphans

from .fork_server import GO, MAX_MESSAGE, READY, ignored_signals
from .lean_imports import lean_imports

# Modules that an engine of the built-in model has imported once it serves; SGLang imports some in functions. Our
# operator comes first, because torch searches all imported modules for the place where an operator is registered.
_MODULES = (
    "kimi_w4a8_eagle3.moe.op",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.layers.attention.intel_amx_backend",
    "sglang.srt.constrained.xgrammar_backend",
    "kimi_w4a8_eagle3.moe.flydsl.backend",
    "kimi_w4a8_eagle3.moe.triton.backend",
    "kimi_w4a8_eagle3.sglang_plugin.upkeep.private",
    "kimi_w4a8_eagle3.sglang_plugin.upkeep.failing_requests",
    "kimi_w4a8_eagle3.sglang_plugin.upkeep.metrics_hook",
    "kimi_w4a8_eagle3.sglang_plugin.model.quark_config",
    "kimi_w4a8_eagle3.sglang_plugin.model.w4a8_moe",
    "kimi_w4a8_laptop.tiny.processor",
)


class Holders:
    """Index from each callable to the modules that hold it, so that one walk serves all hooks.

    SGLang walks through all modules once per hook, which takes a second of each engine's start. Engines inherit the
    fork server's index.
    """

    def __init__(self) -> None:
        self._walked: set[str] = set()
        self._of: dict[int, list[tuple[ModuleType, str]]] = {}

    def replace(self, original: object, wrapped: object, source: object) -> int:
        """Act as `hook_registry._propagate_patch`: replace `original` in all modules but `source`, return how often."""
        self.walk()
        holders = self._of.get(id(original), ())
        found = [(at, name) for at, name in holders if at is not source and vars(at).get(name) is original]
        for module, name in found:
            setattr(module, name, wrapped)
        return len(found)

    def walk(self) -> None:
        """Add the modules that were imported since the last call."""
        new = sys.modules.keys() - self._walked
        self._walked |= new
        for module in [module for name in new if isinstance(module := sys.modules[name], ModuleType)]:
            for name, value in vars(module).items():
                if callable(value):
                    self._of.setdefault(id(value), []).append((module, name))


def serve(control: socket.socket) -> Program:
    """Fork an engine per request until the supervisor closes the socket; return in each engine with its program."""
    supervisor = os.getppid()
    gc.disable()  # importing creates no garbage, and collecting takes a quarter of the time
    _require_one_thread()  # torch is imported, and its libraries may start threads
    with lean_imports():
        for name in _MODULES:
            importlib.import_module(name)  # once, for all engines that are forked
    _require_one_thread()
    holders = Holders()
    holders.walk()
    # the template has imported it, and no other program needs it
    vars(importlib.import_module("sglang.srt.plugins.hook_registry"))["_propagate_patch"] = holders.replace
    gc.freeze()  # pages that no collection touches stay shared between all engines
    gc.enable()
    _write_to(os.open(os.devnull, os.O_WRONLY))
    control.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
        if not message:
            os._exit(0)
        log, reply = descriptors
        if middle := os.fork():
            with suppress(ChildProcessError):  # SIGCHLD may be ignored
                os.waitpid(middle, 0)
            os.close(log)
            os.close(reply)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)  # the grandchild is now an orphan, and the kernel gives it to the supervisor
        control.close()
        while os.getppid() == middle:
            time.sleep(0.001)
        return _become_engine(json.loads(message), log, socket.socket(fileno=reply), supervisor)


def run_to_end(program: Callable[[], None]) -> NoReturn:
    """Run `program` and end this process as Python would, but without freeing its objects.

    Freeing would write to every page that the engines share, and nanobind would report Triton's frozen objects as
    leaks.
    """
    code: Any = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _become_engine(request: dict[str, Any], log: int, reply: socket.socket, supervisor: int) -> Program:
    """Give this process what a new engine would have; return once the supervisor has its process id."""
    die_with_parent()
    if os.getppid() != supervisor:
        os._exit(1)
    os.setsid()
    _write_to(log)
    _ignore_signals(set(request["ignored"]))
    os.environ.update(request["late"])
    tempfile.tempdir = None  # an import has cached the fork server's own
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # `full_disk.Tolerant` passes it on
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        constants.HF_HUB_OFFLINE = True  # huggingface_hub read the variable at its import
    with reply:
        reply.send(str(os.getpid()).encode())
        if reply.recv(len(GO)) != GO:
            os._exit(1)
    program = Program(request["module"], tuple(request["arguments"]))
    setproctitle.setproctitle(" ".join(program.argv))
    _fork_children()
    return program


def _ignore_signals(wanted: set[int]) -> None:
    """Ignore exactly these signals; the fork server may have inherited others from the supervisor."""
    ignored = set(ignored_signals())
    for number in wanted - ignored:
        signal.signal(number, signal.SIG_IGN)
    for number in ignored - wanted:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _fork_children() -> None:
    """Fork this process's children, too, although SGLang asks for spawned ones.

    A child is spawned when this process has a second thread, or when SGLang starts it with another program (numactl).
    ZeroMQ's threads do not count: a child makes sockets of its own and never touches those of its parent. The process
    that starts the schedulers of DP attention has such threads.
    """
    spawning = multiprocessing.spawn.get_executable()

    def start(process: multiprocessing.Process) -> Any:
        forkable = _only_zeromq_has_threads() and multiprocessing.spawn.get_executable() == spawning
        return (ForkProcess if forkable else SpawnProcess)._Popen(process)

    multiprocessing.Process._Popen = staticmethod(start)  # type: ignore  # every start method is chosen here
    multiprocessing.util.register_after_fork(orphans, _become_child)


def _become_child(_: Any) -> None:
    """Give a forked scheduler or detokenizer what a spawned one has."""
    orphans.end_with_parent()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the engine's handler would end this process's children


def _write_to(log: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _require_one_thread() -> None:
    if _threads() != 1:
        sys.exit("kimi-w4a8: importing SGLang started a thread, which no fork would have")


def _only_zeromq_has_threads() -> bool:
    """Return True if this thread is the only one beside ZeroMQ's, which name themselves a moment after their start."""
    deadline = time.monotonic() + 0.5
    while _threads(beside="ZMQbg") > 1:
        if threading.active_count() > 1 or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _threads(beside: str = "\0") -> int:
    """Return the number of this process's threads, without those whose names begin with `beside`."""
    names = (path / "comm" for path in Path("/proc/self/task").iterdir())
    return sum(not name.read_text().startswith(beside) for name in names)


if __name__ == "__main__":
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    run_to_end(partial(run, program.module, program.arguments))

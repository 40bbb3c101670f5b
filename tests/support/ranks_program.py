"""Run by `support.run_program`: SGLang's launch of the schedulers of engines on the machine of `support.two_sockets`.

The processes are not started: each rank's target is read, and `configure_scheduler_process` runs here instead. It binds
itself to its node through libnuma. A program in front of it, which SGLang would write into /tmp, is an error.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
from sglang.srt.entrypoints import engine as engine_module
from sglang.srt.managers import data_parallel_controller as controller
from sglang.srt.managers import scheduler
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import numa_utils

CORES = 128
ALL = set(range(2 * CORES))
# Arguments that place ranks; the rest of a recipe needs its checkpoint or its GPUs.
LAYOUT = ("tp_size", "pp_size", "dp_size", "enable_dp_attention", "nnodes", "node_rank", "base_gpu_id", "numa_node")


def node_cpus(node: int) -> set[int]:
    if node not in (0, 1):
        return set()  # numa_node_to_cpus fails for a node that does not exist
    cores = range(node * CORES // 2, (node + 1) * CORES // 2)
    return {*cores, *(core + CORES for core in cores)}


class Mask:
    """The CPUs of the process that is being configured; refuses an empty set, as sched_setaffinity does."""

    cpus, memory = ALL, None

    @staticmethod
    def bind(_: int, cpus: set[int]) -> None:
        Mask.cpus = cpus

    @staticmethod
    def numa_available() -> int:
        return 0

    @staticmethod
    def numa_set_preferred(node: Any) -> None:
        Mask.memory = node.value

    def cpu_affinity(self, cpus: list[int] | None = None) -> list[int] | None:
        if cpus is None:
            return sorted(Mask.cpus)
        if not set(cpus) & ALL:
            raise ValueError(f"invalid CPUs {cpus}")
        Mask.cpus = set(cpus) & ALL
        return None


class ConfiguredError(BaseException):
    """Ends a scheduler's process where it would load the model."""


class LaunchedError(BaseException):
    """Ends the controller's launch of a group where it would wait until the model is loaded."""


def configured(target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Run the scheduler's own code in the process that `numa_utils` would have started, up to its configuration."""

    def child() -> list[object]:
        Mask.cpus, Mask.memory = ALL, None
        try:
            target(*arguments)
        except ConfiguredError as done:
            return [done.args[0], sorted(Mask.cpus), Mask.memory]
        raise AssertionError("the scheduler did not configure its process")

    answer = in_child(child)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    Process.placed.append(answer)


def in_child(function: Callable[[], object]) -> Any:
    """Return what a fork of this process computes, or its error as text.

    SGLang keeps an engine's settings for the whole process.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = function()
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return SGLang's configuration of a scheduler's process, after which the process ends."""

    def configure(*args: Any, **named: Any) -> None:
        real(*args, **named)
        raise ConfiguredError(inspect.signature(real).bind(*args, **named).arguments["gpu_id"])

    return configure


class Pipe:
    """Both ends of a pipe. Through one, the controller tells a scheduler that waits for it what it is."""

    waiting: Callable[..., object]

    def send(self, message: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
        arguments, shown = message
        configured(self.waiting, (*arguments, self, *shown))

    def recv(self) -> None:
        raise LaunchedError

    def close(self) -> None: ...


class Process:
    """Replaces multiprocessing.Process in SGLang's launchers: `start` runs a scheduler, up to its configuration."""

    placed: ClassVar[list[list[object]]] = []
    waiting: ClassVar[dict[tuple[int, int], tuple[int, Pipe]] | None] = None
    pid = 0

    def __init__(self, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}

    def start(self) -> None:
        if (program := os.fsdecode(multiprocessing.spawn.get_executable())) != sys.executable:
            raise RuntimeError(f"SGLang starts a rank with {program}")
        if self._target is scheduler.run_scheduler_process:
            configured(self._target, self._args)
        elif self._target is controller.run_data_parallel_controller_process:
            Process.waiting = self._kwargs.get("prelaunched_schedulers")
            launch_groups(self._kwargs["server_args"])
        else:
            assert self._target is controller.run_scheduler_process_with_init_pipe, self._target
            target, pipe = self._args
            pipe.waiting = target


def launch_groups(args: ServerArgs) -> None:
    """Let the controller of data parallelism launch its groups."""
    loop = object.__new__(controller.DataParallelController)
    loop.run_scheduler_process_func, loop.env_lock = scheduler.run_scheduler_process, threading.Lock()
    loop.scheduler_procs, loop.prelaunched_schedulers = [], Process.waiting
    loop.attn_replica_size = args.tp_size // args.dp_size  # only for the numbers that a joining engine shows
    ports = SimpleNamespace(nccl_port=0, instance_id="")
    launch = partial(loop.launch_tensor_parallel_group, args, ports)
    if args.enable_dp_attention:  # one launch for all groups
        launches = [partial(launch, 0, None, [0] * args.dp_size)]
    else:
        launches = [partial(launch, group * args.tp_size, group) for group in range(args.dp_size)]
    for one in launches:
        with suppress(LaunchedError):
            one()


def launched(words: list[str], tiny: list[str]) -> list[list[object]]:
    """Return GPU, CPUs and memory node of the ranks of one engine."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    wanted, namespace = vars(parser.parse_args(words)), parser.parse_args(tiny)
    for name in LAYOUT:
        setattr(namespace, name, wanted[name])
    args, Process.placed = ServerArgs.from_cli_args(namespace), []
    publish(args, role="tokenizer")
    engine_module.Engine._launch_scheduler_processes(args, None, scheduler.run_scheduler_process)
    return Process.placed


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    multiprocessing.set_start_method("spawn", force=True)
    for module in (engine_module, controller):
        module.mp = SimpleNamespace(Process=Process, Pipe=lambda **_: (Pipe(),) * 2)
    numa_utils._node_cpus, numa_utils.get_libnuma = node_cpus, lambda: Mask
    numa_utils._can_set_mempolicy = lambda: True
    os.sched_getaffinity, os.sched_setaffinity = lambda _: Mask.cpus, Mask.bind
    scheduler.configure_scheduler_process = stopping(scheduler.configure_scheduler_process)
    psutil.cpu_count = lambda logical=True: 2 * CORES if logical else CORES
    psutil.Process = lambda *_: Mask()
    found, environ = [], dict(os.environ)
    for engine in given["engines"]:
        os.environ.clear()
        os.environ.update(environ | engine["env"])
        found.append(in_child(partial(launched, engine["words"], given["tiny"])))
    print(json.dumps({"engines": found}))


if __name__ == "__main__":
    main()

"""Run by `support.run_program`: SGLang's launch of the schedulers of engines on the machine of `support.two_sockets`.

The processes are not started: each rank's target is read, and `configure_scheduler_process` runs here instead, with the
cores that numactl would have left to it. numactl takes the three options that SGLang writes, and refuses others.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import re
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

    cpus = ALL

    def cpu_affinity(self, cpus: list[int] | None = None) -> list[int] | None:
        if cpus is None:
            return sorted(Mask.cpus)
        if not set(cpus) & ALL:
            raise ValueError(f"invalid CPUs {cpus}")
        Mask.cpus = set(cpus) & ALL
        return None


def applied(script: str) -> tuple[set[int], int | None]:
    """CPUs and memory node after numactl with the arguments of SGLang's script."""
    cpus, memory = ALL, None
    arguments = re.search(r"exec numactl ((?:-\S+ )*)/.* \"\$@\"", script)
    assert arguments is not None, script
    for word in arguments[1].split():
        name, _, value = word.partition("=")
        if name == "--cpunodebind":
            cpus = node_cpus(int(value))
        elif name == "--physcpubind":
            cpus = {int(cpu) for cpu in value.split(",")}
        elif name == "--membind":
            memory = int(value)
        else:
            raise ValueError(f"numactl {word}")
    return cpus, memory


class ConfiguredError(BaseException):
    """Ends a scheduler's process where it would load the model."""


class LaunchedError(BaseException):
    """Ends the controller's launch of a group where it would wait until the model is loaded."""


def configured(script: str | None, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Run the scheduler's own code in the process that `numa_utils` would have started, up to its configuration."""

    def child() -> list[object]:
        Mask.cpus, memory = (ALL, None) if script is None else applied(script)
        try:
            target(*arguments)
        except ConfiguredError as done:
            return [done.args[0], sorted(Mask.cpus), memory]
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

    waiting: tuple[str | None, Callable[..., object]]

    def send(self, message: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
        arguments, shown = message
        script, target = self.waiting
        configured(script, target, (*arguments, self, *shown))

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
        executable = os.fsdecode(multiprocessing.spawn.get_executable())
        script = Path(executable).read_text() if executable.endswith(".sh") else None
        if self._target is scheduler.run_scheduler_process:
            configured(script, self._target, self._args)
        elif self._target is controller.run_data_parallel_controller_process:
            Process.waiting = self._kwargs.get("prelaunched_schedulers")
            launch_groups(self._kwargs["server_args"])
        else:
            assert self._target is controller.run_scheduler_process_with_init_pipe, self._target
            target, pipe = self._args
            pipe.waiting = script, target


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
    numa_utils._node_cpus, numa_utils._probe_numactl_args = node_cpus, lambda arguments: (arguments, "")
    numa_utils._can_set_mempolicy = lambda: True
    os.sched_getaffinity = lambda _: Mask.cpus
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

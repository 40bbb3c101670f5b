"""The processes of a fleet on this machine: their names, and what each holds (memory, descriptors, threads)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from kimi_w4a8_eagle3.engine.leftovers import shared_memory_of

# By what stands on a command line; SGLang's processes give themselves titles.
_KINDS = {
    "sglang::router": "router",
    "fleet.run_router": "router",
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "resource_tracker": "resource tracker",
    "kimi_w4a8_laptop.forked_engine": "fork server",
}


@dataclass(frozen=True)
class Held:
    """Resources of one process: its id, bytes of its own memory, descriptors, connections half closed, threads."""

    pid: int
    uss: int
    fds: int
    close_wait: int
    threads: int


class ProcessTree:
    """`kimi-w4a8 serve` and everything it started. Names stay the same for the whole life of a process.

    engine_ports: port of each replica's engine -> its name, so that two engines are told apart.
    """

    def __init__(self, root: psutil.Process, engine_ports: Mapping[int, str]) -> None:
        self._root, self._engine_ports = root, engine_ports
        self._names: dict[int, str] = {root.pid: "supervisor"}

    def held(self) -> dict[str, Held]:
        """By name; a process that ends while it is read is left out.

        Linux denies an ordinary user the files of a process from the moment at which it gives its memory back.
        """
        found = {}
        for process in self._processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found[self._name(process)] = _held(process)
        return found

    def shared_memory(self) -> list[str]:
        """Files in /dev/shm that these processes have mapped."""
        return sorted(str(path) for path in shared_memory_of(process.pid for process in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _name(self, process: psutil.Process) -> str:
        if process.pid not in self._names:
            name = self._describe(process)
            taken = set(self._names.values())
            numbered = (f"{name} {number}" for number in range(2, 1000))
            self._names[process.pid] = name if name not in taken else next(n for n in numbered if n not in taken)
        return self._names[process.pid]

    def _describe(self, process: psutil.Process) -> str:
        line = " ".join(process.cmdline())
        owner = self._engine_of(process)
        usual = "engine" if owner else process.name()
        kind = next((kind for sign, kind in _KINDS.items() if sign in line), usual)
        return f"{owner} {kind}" if owner else kind

    def _engine_of(self, process: psutil.Process) -> str | None:
        """The replica a process belongs to: the engine's port is on the command line of its main process."""
        for candidate in (process, *process.parents()):
            words = candidate.cmdline()
            if "--port" in words[:-1] and "sglang.launch_server" in words:
                return self._engine_ports.get(int(words[words.index("--port") + 1]))
        return None


def serving_process(base_url: str) -> psutil.Process | None:
    """The `serve` whose router or engine listens at `base_url`; None when that is no process of this machine."""
    port = urlsplit(base_url).port
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and port in c.laddr[1:2])
    connection = next((c for c in listening if c.pid is not None), None)
    if connection is None:
        return None
    process = psutil.Process(connection.pid)
    parent = process.parent()
    return parent if parent is not None and "serve" in parent.cmdline() else process


def _held(process: psutil.Process) -> Held:
    with process.oneshot():
        connections = process.net_connections("tcp")
        return Held(
            pid=process.pid,
            uss=process.memory_full_info().uss,
            fds=process.num_fds(),
            close_wait=sum(connection.status == psutil.CONN_CLOSE_WAIT for connection in connections),
            threads=process.num_threads(),
        )

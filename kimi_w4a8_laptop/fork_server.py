"""Fork engines on a CPU from a process that has imported SGLang once, which takes ten seconds of a core.

A fork server belongs to the process that supervises engines. It starts with the first engine and ends with the
supervisor. A new engine is orphaned on purpose, and the kernel gives an orphan to the nearest ancestor that asked for
orphans (a subreaper), the supervisor. So an engine has the same parent, session, signals and exit code as one started
by `subprocess`, and it outlives a fork server that is killed. Engines on GPUs start SGLang's own way. The fork server's
side is `forked_engine.py`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, TypeGuard

from kimi_w4a8_eagle3.engine.process import Command, Program, dying_with_parent

FORK_SERVER = "kimi_w4a8_laptop.forked_engine"
READY, GO = b"ready", b"go"
MAX_MESSAGE = 1 << 17
_KEPT = 2  # fork servers, of 300 MB each: the two servers of a comparison may differ in a variable
# SGLang reads the cores of each rank when a scheduler starts; oneDNN reads its instruction set at its first product.
_LATE = frozenset(("TMPDIR", "PYTEST_CURRENT_TEST", "SGLANG_CPU_OMP_THREADS_BIND", "ONEDNN_MAX_CPU_ISA"))
# `kimi-w4a8` itself gets these when it imports sklearn or torch, so they say nothing about an engine.
_LATE |= frozenset(("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"))
_IMPORT_S = 600.0  # ten seconds on an idle machine
_FORK_S = 60.0  # milliseconds on an idle machine
_UNKNOWN = 255
_NEVER_INHERITED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them at its start, and `subprocess` resets them
_PR_SET_CHILD_SUBREAPER = 36
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ForkedProcess:
    """A child of this process that `subprocess` did not start, with the part of `subprocess.Popen` that is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()  # waitpid reports an exit code only once, so the first caller stores it

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # SIGCHLD is ignored, so the exit code is lost
                    self._code = _UNKNOWN
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """A fork server and the socket to it; raises OSError when it ends before it is ready."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, control: socket.socket) -> None:
        self._process, self._control = process, control
        try:
            control.settimeout(_IMPORT_S)
            if control.recv(MAX_MESSAGE) != READY:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)  # it may log its reason after its end of the socket is closed
                raise ChildProcessError("the fork server ended while it imported SGLang")
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, environ: Mapping[str, str], log: int) -> ForkServer:
        """Start a fork server; until it is ready it writes to `log`."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A child dies with the thread that started it. This thread ends with the process.
            process = _starter.submit(
                subprocess.Popen,
                dying_with_parent(Program(FORK_SERVER, (str(theirs.fileno()),)).argv),
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).result()
        return cls(process, control)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the fork server accepts requests."""
        return self._process.poll() is None

    def fork(self, program: Program, late: Mapping[str, str], log: int) -> ForkedProcess:
        """Fork a program with these `late` variables and log; raise OSError when the fork server has ended."""
        request = {**asdict(program), "late": dict(late), "ignored": ignored_signals()}
        message = json.dumps(request).encode()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reply.settimeout(_FORK_S)
        with reply, _adopting():
            with theirs:
                socket.send_fds(self._control, [message], [log, theirs.fileno()])
            answer = reply.recv(MAX_MESSAGE)
            if not answer:
                raise ChildProcessError("the fork server ended")
            process = ForkedProcess(int(answer))
            reply.send(GO)  # an engine that never reads this ends, so that no engine runs unsupervised
            return process

    def close(self) -> None:
        """End the fork server; its engines go on."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class Forks:
    """Forks engines on a CPU, and the programs that measure them; None for what starts as a new process instead."""

    def prepare(self, command: Command, environ: Mapping[str, str], log: Path) -> None:
        if can_fork(command, environ):
            prepare(environ, log)

    def engine(self, command: Command, environ: Mapping[str, str], log: int) -> ForkedProcess | None:
        return fork(command, environ, log) if can_fork(command, environ) else None

    def program(self, program: Program, changes: Mapping[str, str], log: int) -> ForkedProcess | None:
        return fork_beside(program, changes, log)


STARTER = Forks()


def can_fork(command: Command, environ: Mapping[str, str]) -> TypeGuard[Program]:
    """Return True for an engine on a CPU that can be forked.

    With more than one OpenMP thread, libraries start threads during their import, and a fork loses those.
    """
    return sys.platform == "linux" and isinstance(command, Program) and environ.get("OMP_NUM_THREADS") == "1"


def fork(program: Program, environ: Mapping[str, str], log: int) -> ForkedProcess | None:
    """Start `program` in `environ` as a fork that writes to `log`; return None on failure, which `log` explains.

    Starts a fork server and waits for its imports if none has the same variables, folder and limits. One that was
    killed is replaced. Thread-safe.
    """
    late = {name: value for name, value in environ.items() if reads_late(name)}
    key = setting(environ)
    with _lock:
        server = _servers.pop(key, None)
        try:
            if server is None or not server.alive:
                server = _another(key, log)
            process = server.fork(program, late, log)
        except BaseException as error:
            if server is not None:
                server.close()  # an engine that is being forked ends, because it gets no answer
            if not isinstance(error, OSError):
                raise
            with suppress(OSError):
                os.write(log, f"kimi-w4a8: the engine starts without the fork server: {error}\n".encode())
            return None
        _servers[key] = server  # most recently used last
        return process


def prepare(environ: Mapping[str, str], log: Path) -> None:
    """Start the imports for engines in `environ` in the background; `fork` then waits for them.

    log: the imports' output is appended there.
    """

    def start() -> None:
        with suppress(OSError), _lock, log.open("ab") as output:  # `fork` tries again and reports the error
            if key not in _servers:
                _servers[key] = _another(key, output.fileno())

    key = setting(environ)
    threading.Thread(target=start, name="prepare", daemon=True).start()


def fork_beside(program: Program, changes: Mapping[str, str], log: int) -> ForkedProcess | None:
    """Fork a program that measures engines from the last engine's fork server; return None without one.

    The program has that engine's variables and these changes, none of which is read during imports.
    """
    with _lock:
        server = next(reversed(_servers.values()), None)
        if server is None or not server.alive:
            return None
        try:
            return server.fork(program, changes, log)
        except OSError:
            return None


def close() -> None:
    """End this process's fork servers; the next engine starts another."""
    while _servers:
        _servers.popitem()[1].close()


class Setting(NamedTuple):
    """Properties that all engines of one fork server share: fixed at its start, or read during its imports."""

    variables: tuple[tuple[str, str], ...]
    folder: str
    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]


def _another(key: Setting, log: int) -> ForkServer:
    """Start a fork server; at the limit, close the least recently used one first."""
    while len(_servers) >= _KEPT:
        _servers.pop(next(iter(_servers))).close()
    return ForkServer.start(dict(key.variables), log)


def setting(environ: Mapping[str, str]) -> Setting:
    """Environment, cwd, limits and CPU affinity that a new engine inherits."""
    early = sorted((name, value) for name, value in environ.items() if not reads_late(name))
    limits = tuple(resource.getrlimit(limit) for limit in _LIMITS)
    return Setting(tuple(early), str(Path.cwd()), limits, frozenset(os.sched_getaffinity(0)))


def reads_late(name: str) -> bool:
    """Return True if no module reads this variable at its import, so that engines of one fork server may differ."""
    return name in _LATE or (name.startswith("KIMI_") and name != "KIMI_VIRTUAL_NODE")


def ignored_signals() -> list[int]:
    """Return the signals that a new child would ignore, such as SIGINT in a script's background job."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    return [int(number) for number in ignored if number not in _NEVER_INHERITED]


@contextmanager
def _adopting() -> Iterator[None]:
    """Inside the block, make orphaned descendants children of this process instead of init."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


_lock = threading.Lock()
_servers: dict[Setting, ForkServer] = {}
_starter = ThreadPoolExecutor(1, thread_name_prefix="fork-server")
atexit.register(close)

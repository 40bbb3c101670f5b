"""Engines on a CPU as forks of a process that has imported SGLang once, which takes ten seconds and a core each time.

A fork server belongs to the process that supervises engines, begins with its first engine and ends with it. The fork is
handed over to the supervisor, by the rule that orphans go to the nearest process that asked for them: an engine has the
same parent, session, signals and exit code as one started by `subprocess`, and outlives a fork server that is killed.
Engines on GPUs are started SGLang's own way. The other side is `sglang_plugin/forked_engine.py`.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PROGRAM = ("-m", "kimi_w4a8_eagle3.sglang_plugin.run_module")
OPTION = "--fork-server"
READY, GO = b"ready", b"go"
MAX_MESSAGE = 1 << 17
_KEPT = 2  # fork servers, of 300 MB each: the two sides of a comparison may differ in a variable
# SGLang reads the cores of each rank when a scheduler begins, oneDNN its instructions at its first product.
_LATE = frozenset(("TMPDIR", "PYTEST_CURRENT_TEST", "SGLANG_CPU_OMP_THREADS_BIND", "ONEDNN_MAX_CPU_ISA"))
_IMPORT_S = 600.0  # ten seconds on an idle machine
_FORK_S = 60.0  # milliseconds
_UNKNOWN = 255
_NEVER_INHERITED = (signal.SIGPIPE, signal.SIGXFSZ)  # `subprocess` resets them, and Python ignores them when it starts
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ForkedProcess:
    """A child of this process that something else started; what is used of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()  # whoever asks first gets the exit code, once

    def poll(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # it has ended where SIGCHLD is ignored: nobody can know how
                    self._code = _UNKNOWN
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """A fork server, and the socket by which it is asked; raises OSError when it ends before it is ready."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, control: socket.socket) -> None:
        self._process, self._control = process, control
        try:
            control.settimeout(_IMPORT_S)
            if control.recv(MAX_MESSAGE) != READY:
                raise ChildProcessError("the fork server ended while it imported SGLang")
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, python: str, environ: Mapping[str, str], log: int) -> ForkServer:
        """A new one; `log` is where it writes until it is ready."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A child dies with the thread that started it: this thread ends with the process.
            process = _starter.submit(
                subprocess.Popen,
                [python, *PROGRAM, OPTION, str(theirs.fileno())],
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            ).result()
        return cls(process, control)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def fork(self, arguments: Sequence[str], late: Mapping[str, str], log: int) -> ForkedProcess:
        """An engine with these arguments, of `late` variables and a log; OSError when the fork server has ended."""
        request = {"arguments": list(arguments), "late": dict(late), "ignored": ignored_signals()}
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
            reply.send(GO)  # an engine that never reads this ends, because nobody would know of it
            return process

    def close(self) -> None:
        """End it. Its engines go on."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def can_fork(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether this is an engine on a CPU that can be forked.

    Where more OpenMP threads than one are allowed, libraries start them while they are imported, and no fork has them.
    """
    return sys.platform == "linux" and tuple(argv[1:3]) == PROGRAM and environ.get("OMP_NUM_THREADS") == "1"


def fork(argv: Sequence[str], environ: Mapping[str, str], log: int) -> ForkedProcess | None:
    """`argv` in `environ`, with `log` as its output, as a fork; None where that failed, which `log` explains.

    Waits for the fork server's imports where there is none, or none with the same variables, folder and limits. One
    that was killed is replaced. Thread-safe.
    """
    late = {name: value for name, value in environ.items() if reads_late(name)}
    key = setting(argv[0], environ)
    with _lock:
        server = _servers.pop(key, None)
        try:
            if server is None or not server.alive:
                server = _another(key, log)
            process = server.fork(argv[3:], late, log)
        except BaseException as error:
            if server is not None:
                server.close()  # an engine may be on its way, and ends when nobody answers it
            if not isinstance(error, OSError):
                raise
            with suppress(OSError):
                os.write(log, f"kimi-w4a8: the engine starts without the fork server: {error}\n".encode())
            return None
        _servers[key] = server  # the last one that was used
        return process


def prepare(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
    """Begin the imports for engines like this one, which `fork` then waits for, while this process does something else.

    log: what they print is appended there.
    """

    def start() -> None:
        with suppress(OSError), _lock, log.open("ab") as output:  # `fork` tries again, and says why it cannot
            if key not in _servers:
                _servers[key] = _another(key, output.fileno())

    if can_fork(argv, environ):
        key = setting(argv[0], environ)
        threading.Thread(target=start, name="prepare", daemon=True).start()


def fork_beside(argv: Sequence[str], changes: Mapping[str, str], log: int) -> ForkedProcess | None:
    """A program of SGLang's that measures engines, as a fork from where the last of them came; None without one.

    It has the variables of that engine and these changes, none of which is read early.
    """
    with _lock:
        server = next(reversed(_servers.values()), None)
        if server is None or not server.alive or tuple(argv[1:3]) != PROGRAM:
            return None
        try:
            return server.fork(argv[3:], changes, log)
        except OSError:
            return None


def close() -> None:
    """End this process's fork servers, if it has any; the next engine starts another."""
    while _servers:
        _servers.popitem()[1].close()


class Setting(NamedTuple):
    """What the engines of one fork server have in common, because a process cannot change it or has read it early."""

    python: str
    variables: tuple[tuple[str, str], ...]
    folder: str
    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]


def _another(key: Setting, log: int) -> ForkServer:
    """A new fork server; the one that was used longest ago makes room."""
    while len(_servers) >= _KEPT:
        _servers.pop(next(iter(_servers))).close()
    return ForkServer.start(key.python, dict(key.variables), log)


def setting(python: str, environ: Mapping[str, str]) -> Setting:
    """That of an engine which this process starts now."""
    early = sorted((name, value) for name, value in environ.items() if not reads_late(name))
    limits = tuple(resource.getrlimit(limit) for limit in _LIMITS)
    return Setting(python, tuple(early), str(Path.cwd()), limits, frozenset(os.sched_getaffinity(0)))


def reads_late(name: str) -> bool:
    """Whether no module reads this variable while it is imported: engines of one fork server may differ in it."""
    return name in _LATE or name.startswith("KIMI_")


def ignored_signals() -> list[int]:
    """Signals that a new process of this one would ignore, such as SIGINT in a script's background job."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    return [int(number) for number in ignored if number not in _NEVER_INHERITED]


def die_with_parent() -> None:
    """In a new child: end when the process that started it dies, whatever killed it (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _adopting() -> Iterator[None]:
    """Inside the block an orphaned descendant becomes a child of this process instead of init's."""
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

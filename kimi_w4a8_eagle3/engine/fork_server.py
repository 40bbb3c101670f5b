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

PROGRAM = ("-m", "kimi_w4a8_eagle3.sglang_plugin.run_module")
OPTION = "--fork-server"
READY, GO = b"ready", b"go"
MAX_MESSAGE = 1 << 17
_MODULE = "sglang.launch_server"
_IMPORT_S = 600.0  # ten seconds on an idle machine
_FORK_S = 60.0  # milliseconds
_UNKNOWN = 255
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
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """One fork server; `log` is where it writes until it is ready. Raises OSError when it ends before."""

    def __init__(self, python: str, environ: Mapping[str, str], log: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A child dies with the thread that started it: this thread ends with the process.
            self._process = _starter.submit(
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
        try:
            self._control.settimeout(_IMPORT_S)
            if self._control.recv(MAX_MESSAGE) != READY:
                raise ChildProcessError("the fork server ended while it imported SGLang")
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def fork(self, arguments: Sequence[str], late: Mapping[str, str], log: int) -> ForkedProcess:
        """An engine with these arguments, of `late` variables and a log; OSError when the fork server has ended."""
        message = json.dumps({"arguments": list(arguments), "late": dict(late)}).encode()
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
    return sys.platform == "linux" and tuple(argv[1:4]) == (*PROGRAM, _MODULE) and environ.get("OMP_NUM_THREADS") == "1"


def fork(argv: Sequence[str], environ: Mapping[str, str], log: int) -> ForkedProcess | None:
    """`argv` in `environ`, with `log` as its output, as a fork; None where that failed, which `log` explains.

    Waits for the fork server's imports where there is none, or none with the same variables, folder and limits. One
    that was killed is replaced. Thread-safe.
    """
    global _server
    early = {name: value for name, value in environ.items() if not reads_late(name)}
    late = {name: value for name, value in environ.items() if reads_late(name)}
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    with _lock:
        try:
            key = (argv[0], early, str(Path.cwd()), limits, os.sched_getaffinity(0))
            if _server is None or _server[0] != key or not _server[1].alive:
                close()
                _server = (key, ForkServer(argv[0], early, log))
            return _server[1].fork(argv[3:], late, log)
        except OSError as error:
            close()
            with suppress(OSError):
                os.write(log, f"kimi: the engine starts without the fork server: {error}\n".encode())
            return None
        except BaseException:
            close()  # an engine may be on its way, and ends when nobody answers it
            raise


def close() -> None:
    """End this process's fork server, if it has one; the next engine starts another."""
    global _server
    if _server is not None:
        server, _server = _server[1], None
        server.close()


def reads_late(name: str) -> bool:
    """Whether no module reads this variable while it is imported: engines of one fork server may differ in it."""
    return name in ("TMPDIR", "PYTEST_CURRENT_TEST") or name.startswith("KIMI_")


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
_server: tuple[tuple[object, ...], ForkServer] | None = None
_starter = ThreadPoolExecutor(1, thread_name_prefix="fork-server")
atexit.register(close)

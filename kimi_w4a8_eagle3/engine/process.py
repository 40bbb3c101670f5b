"""An engine process: start it, wait until it answers, stop it with all its children, and keep its log.

It asks the engine only for /health. The command line and the environment come from a recipe. A new process imports
SGLang, which takes ten seconds of a core. On a CPU kimi-w4a8-laptop forks one that has done so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

import httpx
import psutil

from ..base.errors import KimiError, UsageError
from ..base.http import Address, bearer, http_url, trusted
from ..base.installed import laptop_part
from ..base.program import Command, Program, words
from .leftovers import Belongings

_PR_SET_PDEATHSIG = 1


def start_engine(command: Command, environ: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    """Start an engine in a session of its own; it gets SIGTERM when this process dies. laptop forks it on a CPU.

    environ: all variables of the engine. log: file descriptor for its output.
    """
    laptop = laptop_part("starter")
    forked: subprocess.Popen[bytes] | None = laptop and laptop.engine(command, environ, log)
    return forked or subprocess.Popen(
        dying_with_parent(words(command)),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def start_program(program: Program, changes: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    """Start a program that measures engines. changes: variables added to this process's environment."""
    laptop = laptop_part("starter")
    forked: subprocess.Popen[bytes] | None = laptop and laptop.program(program, changes, log)
    return forked or subprocess.Popen(
        program.argv, env={**os.environ, **changes}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )


_prctl = ctypes.CDLL(None).prctl  # before any fork: a thread may hold the loader's lock, which a child keeps forever


def die_with_parent() -> None:
    """In a new child: end when the process that started it dies, for whatever reason (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGTERM:d})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that does so and becomes `command`: `preexec_fn` may deadlock where threads run."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


_STOP_GRACE_S = 20.0
_POLL_S = 0.25
_LOOK_S = 5.0  # between two checks of an engine's shared memory, which take milliseconds per process
_TAIL_LINES = 25
_FIRST_PORT = 10_000
_DP_ATTENTION_PORTS = range(233, 247)  # after the server's own: ZMQ_TCP_PORT_DELTA and more in SGLang's server_args.py


@dataclass
class EngineServer:
    """One engine process in its own session.

    command: a command line, or a program that laptop may fork. env: added to this process's environment. log_path:
    stdout and stderr, appended. As a context manager it starts on entry and stops, with all its children, on exit.
    """

    command: Command
    env: Mapping[str, str]
    host: str
    port: int
    log_path: Path
    name: str = "server"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _children: dict[int, psutil.Process] = field(default_factory=dict, repr=False)
    _belongings: Belongings | None = field(default=None, repr=False)
    _look_again: float = field(default=0.0, repr=False)
    _began: float = field(default=0.0, repr=False)

    @property
    def base_url(self) -> str:
        return http_url(self.host, self.port)

    @property
    def pid(self) -> int:
        """Process id of the engine's main process."""
        if self._process is None:
            raise KimiError(f"{self.name} was not started")
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Temporary folder that the engine was given."""
        if self._belongings is None:
            raise KimiError(f"{self.name} was not started")
        return self._belongings.folder

    @property
    def address(self) -> Address:
        """The engine's own address, with this start's secret."""
        return Address(self.base_url, self.secret)

    @property
    def secret(self) -> str:
        """Key of this start, without which the engine answers nobody."""
        if self._belongings is None:
            raise KimiError(f"{self.name} was not started")
        return self._belongings.secret

    def prepare(self) -> None:
        """Start SGLang's imports in the background, for which the first engine on a CPU would wait."""
        if laptop := laptop_part("starter"):
            laptop.prepare(self.command, self._environ(), self.log_path)

    def start(self) -> None:
        """Start the process; raise KimiError when the port is taken or the program cannot be executed.

        The first engine on a CPU waits until SGLang is imported. After the process has ended, call this again to
        restart it; the remains of the old process are removed first.
        """
        self.stop()
        self._began = time.monotonic()
        require_free_port(self.host, self.port)
        try:
            self._belongings = Belongings()
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            environ = self._environ(TMPDIR=str(self._belongings.folder))
            with os.fdopen(os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
                self._process = start_engine(self.command, environ, log.fileno())
        except BaseException as error:
            self._remove_belongings()
            if not isinstance(error, OSError):
                raise
            raise KimiError(
                f"{self.name} could not be started: {error.strerror}",
                where=error.filename or str(self.log_path),
                expected="an executable program and a writable log folder",
            ) from error

    def wait_ready(self, timeout_s: float, on_wait: Callable[[], None] | None = None) -> float:
        """Wait until /health answers 200; return the seconds since `start`.

        on_wait is called about four times a second. Raises KimiError when the process ends or
        does not answer within `timeout_s` of `start`; the process is stopped first.
        """
        with httpx.Client(timeout=5.0, verify=trusted()) as client:
            while True:
                elapsed = time.monotonic() - self._began
                if (code := self.poll()) is not None:
                    self.stop()
                    raise ended(f"{self.name} ended with exit code {code} before it was ready", self.log_path)
                with suppress(httpx.HTTPError):
                    if client.get(f"{self.base_url}/health", headers=bearer(self.secret)).status_code == 200:
                        return elapsed
                if elapsed > timeout_s:
                    self.stop()
                    raise ended(f"{self.name} was not ready within {timeout_s:.0f} s", self.log_path)
                if on_wait is not None:
                    on_wait()
                time.sleep(_POLL_S)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        self._remember_children()
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = _STOP_GRACE_S) -> bool:
        """End the process and all its children: SIGTERM, then SIGKILL after `grace_s`. Idempotent.

        SGLang finishes its running requests before it ends, so a long grace is a drain. Another thread may call it
        with a shorter one. Returns False if it was killed.
        """
        if self._process is None:
            return True
        self._remember_children()
        by_itself = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                by_itself = False
                self._process.kill()
                self._process.wait()
        survivors = [child for child in tuple(self._children.values()) if child.is_running()]
        for number, wait_s in ((signal.SIGTERM, min(grace_s, 3.0)), (signal.SIGKILL, 3.0)):
            for child in survivors:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
            _, survivors = psutil.wait_procs(survivors, timeout=wait_s)
        self._remove_belongings()
        return by_itself

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.env, **more}

    def _remember_children(self) -> None:
        """Record the children while their parent lives; orphans of a crashed engine could not be found later."""
        if self._process is None or self._process.poll() is not None:
            return
        try:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._children[child.pid] = child  # the system may give the number of one that ended to another one
        except psutil.NoSuchProcess:
            return
        if self._belongings is not None and time.monotonic() >= self._look_again:
            self._belongings.see([self._process.pid, *self._children])
            self._look_again = time.monotonic() + _LOOK_S

    def _remove_belongings(self) -> None:
        if self._belongings is not None:
            self._belongings.remove()


def free_port() -> int:
    """Return a port that nothing on loopback uses, nor those after it that SGLang takes for DP attention.

    It lies below the ports of outgoing connections, one of which could take it before the engine does.
    """
    range_of_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    end = max(int(range_of_kernel.split()[0]), 2 * _FIRST_PORT) - _DP_ATTENTION_PORTS.stop
    while True:
        port = SystemRandom().randrange(_FIRST_PORT, end)  # tests of several processes seed the other generator alike
        if all(map(_is_free, (port, *(port + more for more in _DP_ATTENTION_PORTS)))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def require_free_port(host: str, port: int) -> None:
    """Raise KimiError when `port` is taken or not a port, and name the process that uses it if that is visible."""
    if not 0 < port < 65536:
        raise UsageError(f"{port} is not a TCP port", expected="1 to 65535", where="the port")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "0.0.0.0", port))
        except OSError as error:
            raise KimiError(
                f"port {port} on {host} cannot be used: {error.strerror}{_owner(host, port)}",
                where="the server's address",
                expected="a port that nothing listens on",
                remedy="stop that process, or choose another port with --port",
            ) from error


def tail_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a text file that may still be written; empty if there is no file."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except OSError:
        return []


def ended(what: str, log: Path) -> KimiError:
    """Return the error of a process, with the end of its log."""
    tail = "\n".join(tail_lines(log, _TAIL_LINES))
    return KimiError(f"{what}; the end of its log:\n{tail}", where=str(log))


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank."""
    return next((line for line in reversed(tail_lines(path, _TAIL_LINES)) if line.strip()), "")


def _owner(host: str, port: int) -> str:
    """Return who listens on the port, at this address rather than at another one of the machine."""
    try:
        listening = [one for one in psutil.net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN and one.pid]
        owners = [one for one in listening if one.laddr[1:2] == (port,)]
        for one in sorted(owners, key=lambda one: getattr(one.laddr, "ip", "") not in (host, "0.0.0.0", "::"))[:1]:
            return f" (used by process {one.pid}, {psutil.Process(one.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""

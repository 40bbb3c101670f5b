"""`kimi-w4a8 serve` as another program sees it: started as an operator starts it, followed by its events.

The fault table and the tests break an engine with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import httpx
import psutil

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_eagle3.base.run_dir import EVENTS
from kimi_w4a8_eagle3.engine.leftovers import shared_memory_of
from kimi_w4a8_eagle3.engine.process import free_port, tail_lines
from kimi_w4a8_eagle3.engine.signs import is_alive
from kimi_w4a8_laptop.fork_server import ForkedProcess

START_TIMEOUT_S = 400.0
_POLL_S = 0.1
_LINGER_S = 15.0  # for processes that outlive `kimi-w4a8 serve`, before they are killed
_PHASES = frozenset({"starting", "checking", "ready", "draining", "stalled", "down"})
_PRIVATE = re.compile("KIMI_API_KEY")


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl; time in Unix seconds."""

    time: float
    source: str
    event: str
    reason: str


@dataclass(frozen=True)
class Leftovers:
    """Remains of a server that has ended; there may be none."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()
    temporary_files: tuple[str, ...] = ()

    def since(self, earlier: Leftovers) -> Leftovers:
        """The remains that `earlier` does not have."""
        known = vars(earlier)
        return Leftovers(*(tuple(one for one in found if one not in known[name]) for name, found in vars(self).items()))

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        parts = ((name.replace("_", " "), found) for name, found in vars(self).items() if found)
        return "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in parts) or "nothing"


class ServedEngine:
    """`kimi-w4a8 serve --recipe tiny` with its runs and temporary files in `folder`.

    Used as a context manager; the exit ends it, with kill -9 where it does not end by itself, and takes no leftovers
    into account: ask `leftovers` after `stop` for that. arguments: more words for it; program: what `kimi-w4a8` is.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "kimi_w4a8_eagle3.cli"),
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.folder = folder
        self.port, self.ops_port = port or free_port(), free_port()
        self.base_url, self.ops_url = f"http://{host}:{self.port}", f"http://127.0.0.1:{self.ops_port}"
        self.output, self._program = folder / "kimi.out", program
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.words = [
            *("serve", "--recipe", "tiny", "--ops-port", str(self.ops_port)),
            *("--set", f"host={host}", "--set", f"port={self.port}", *arguments),
        ]
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._run: Path | None = None
        self._http = httpx.Client(timeout=20.0)
        self._family: dict[int, psutil.Process] = {}
        self._ports: set[int] = {self.port, self.ops_port}
        self._shared_memory: set[Path] = set()

    @property
    def process(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """`kimi-w4a8 serve` itself."""
        if self._process is None:
            raise KimiError("the server was not started")
        return self._process

    @property
    def temporary(self) -> Path:
        """Folder for temporary files of this server alone."""
        if self._temporary is None:
            raise KimiError("the server was not started")
        return Path(self._temporary.name)

    @property
    def run(self) -> Path:
        if self._run is None:
            found = sorted(self.folder.glob("runs/*-serve-*"))
            if not found:
                raise self._failure("`kimi-w4a8 serve` made no run folder")
            self._run = found[-1]
        return self._run

    def start(self) -> None:
        """Start it; returns at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.TemporaryDirectory(prefix="kf-", ignore_cleanup_errors=True)
        # The keys of another service do not belong to a server of its own.
        environ = {name: value for name, value in os.environ.items() if not _PRIVATE.match(name)}
        with self.output.open("ab") as output:
            self._process = self._begin(environ | {"TMPDIR": self._temporary.name}, output)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, since: float = 0.0) -> float:
        """Wait until the engine is ready; returns the Unix time from which on it was so.

        since: only a moment after this Unix time counts. Raises KimiError when `serve` ends or takes too long.
        """
        began = time.monotonic()
        while True:
            self.look()
            ready = ready_since(self.events())
            if ready is not None and ready >= since:
                return ready
            if self.process.poll() is not None:
                raise self._failure(f"`kimi-w4a8 serve` ended with exit code {self.process.poll()}")
            if time.monotonic() - began > timeout_s:
                raise self._failure(f"the engine was not ready within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def events(self) -> list[Event]:
        try:
            lines = (self.run / EVENTS).read_text().splitlines()
        except (OSError, KimiError):
            return []
        return [event for line in lines if (event := _event(line)) is not None]

    def wait_event(self, matches: Callable[[Event], bool], since: float, timeout_s: float) -> Event:
        """The first event after a Unix time that matches; KimiError when none comes."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            self.look()
            for event in self.events():
                if event.time >= since and matches(event):
                    return event
            time.sleep(_POLL_S)
        raise self._failure(f"an event did not come within {timeout_s:.0f} s")

    @property
    def address(self) -> Address:
        """SGLang's own API of the engine that runs now."""
        named = json.loads((self.run / "engine.json").read_text())
        return Address(named["url"], named["secret"])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get(f"{self.ops_url}/status").json()
        return found

    def engine(self) -> psutil.Process:
        """The main process of the engine."""
        for _ in range(20):  # one look at /proc can miss a process while others come and go
            for process in self.look():
                words = " ".join(_words(process))
                if "launch_server" in words:
                    return process
            time.sleep(0.1)
        raise self._failure("there is no engine process")

    def scheduler(self) -> psutil.Process:
        """The process that computes."""
        for process in self.engine().children(recursive=True):
            if "scheduler" in " ".join([process.name(), *_words(process)]):
                return process
        raise self._failure("the engine has no scheduler process")

    def look(self) -> list[psutil.Process]:
        """All processes of the server that live now; remembers them, their ports and memory, for `leftovers`."""
        try:
            kimi = psutil.Process(self.process.pid)
            family = [kimi, *kimi.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        for process in family:
            self._family.setdefault(process.pid, process)
            words = _words(process)
            if "--port" in words:
                self._ports.add(int(words[words.index("--port") + 1]))
        self._shared_memory |= shared_memory_of(process.pid for process in family)
        return family

    def stop(self, signal_number: int, timeout_s: float = 180.0) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.look()
        self.process.send_signal(signal_number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(
                f"`kimi-w4a8 serve` did not end within {timeout_s:.0f} s of signal {signal_number}"
            ) from None

    def debris(self, known: Leftovers | None = None, patience_s: float = 15.0) -> Leftovers:
        """Remains of engines that have ended while the server lives on, without the `known` ones."""
        known = known or Leftovers()
        end = time.monotonic() + patience_s
        while (found := self._debris().since(known)) and time.monotonic() < end:
            time.sleep(0.25)
        return found

    def leftovers(self, patience_s: float = 30.0) -> Leftovers:
        """Remains of an ended server, once `patience_s` have passed or nothing is left."""
        end = time.monotonic() + patience_s
        while (found := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.25)
        return found

    def __enter__(self) -> ServedEngine:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.look()
            self.process.terminate()
            try:
                self.process.wait(30.0 if kind is None else 5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=_LINGER_S)
        for process in alive:
            _kill(process)
        psutil.wait_procs(alive, timeout=_LINGER_S)
        self._http.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _begin(self, environ: dict[str, str], output: BinaryIO) -> subprocess.Popen[bytes] | ForkedProcess:
        return subprocess.Popen(
            [*self._program, *self.words],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _debris(self) -> Leftovers:
        family = self.look()
        ours = {process.pid for process in family}
        orphans = [process for process in self._family.values() if process.pid not in ours and is_alive(process)]
        used = shared_memory_of(ours)
        used_paths = [path for process in family for path in (*_sockets(process), _temporary(process))]
        folders = sorted(self.temporary.glob("kimi-*"))
        surplus = [path.name for path in folders if not any(used.startswith(f"{path}/") for used in used_paths)]
        return Leftovers(
            processes=tuple(f"{process.pid} {_name(process)}" for process in orphans),
            # without ports: each belongs to a process
            shared_memory=tuple(sorted(path.name for path in self._shared_memory - used if path.exists())),
            temporary_files=tuple(surplus),
        )

    def _leftovers(self) -> Leftovers:
        alive = [process for process in self._family.values() if is_alive(process)]
        files = sorted(path.name for path in self.temporary.iterdir())
        return Leftovers(
            processes=tuple(f"{process.pid} {_name(process)}" for process in alive),
            ports=tuple(sorted(self._ports & _listening())),
            shared_memory=tuple(sorted(path.name for path in self._shared_memory if path.exists())),
            temporary_files=tuple(files),
        )

    def _failure(self, what: str) -> KimiError:
        tail = "\n".join(tail_lines(self.output, 15))
        return KimiError(f"{what}; the end of its output:\n{tail}", where=str(self.folder))


def ready_since(events: Sequence[Event]) -> float | None:
    """Time of the event since which the engine is ready; None when it is not now."""
    phases = [event for event in events if event.event in _PHASES]
    return phases[-1].time if phases and phases[-1].event == "ready" else None


def _event(line: str) -> Event | None:
    """None for a line that a full disk cut off."""
    try:
        return Event(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _temporary(process: psutil.Process) -> str:
    """The folder for temporary files that it was started with; a fork's is not seen here."""
    try:
        return f"{process.environ().get('TMPDIR')}/"
    except psutil.Error:
        return ""


def _sockets(process: psutil.Process) -> list[str]:
    """Paths of its Unix sockets: each engine has some in its folder."""
    try:
        return [str(connection.laddr) for connection in process.net_connections("unix")]
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        return "(ended)"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _listening() -> set[int]:
    found = psutil.net_connections("tcp")
    return {int(c.laddr[1]) for c in found if c.status == psutil.CONN_LISTEN and len(c.laddr) == 2}

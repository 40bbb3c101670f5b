"""Remove what an engine leaves in /tmp and /dev/shm, because SGLang unlinks its sockets and shared memory only in CI.

An engine that restarts every day would fill both. Each engine therefore gets its own temporary folder, and the shared
memory that its processes use is recorded there. The supervisor removes both when the engine ends. If the supervisor was
killed, the next start finds its folders by their lock, which the kernel released. An engine records shared memory
before it creates it (`given_folder.note`), because both processes may be killed between two checks of the supervisor.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .given_folder import LOCK, NOTES, SECRET

_PREFIX = "kimi-"  # short: SGLang's sockets lie in the folder, and a socket's path has at most 107 characters
_SHARED_MEMORY = "shared-memory.txt"
_DEV_SHM = "/dev/shm/"


class Belongings:
    """The temporary folder and the shared memory of one engine, from its start until `remove`.

    folder: give it to the engine as TMPDIR. secret: of this start, which the engine reads there.
    """

    def __init__(self) -> None:
        remove_orphans()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.secret = secrets.token_urlsafe(32)
        with os.fdopen(os.open(self.folder / SECRET, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(self.secret)
        unlocked = self.folder / (LOCK + ".tmp")
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.folder / LOCK)  # under its final name the file is never seen unlocked
        self._seen: set[Path] = set()
        self._removal = threading.Lock()

    def see(self, pids: Iterable[int]) -> None:
        """Record the shared memory that these processes use now. Cheap enough to run every few seconds."""
        new = shared_memory_of(pids) - self._seen
        if new:
            self._seen |= new
            with suppress(OSError):  # matters only if this supervisor is killed
                (self.folder / _SHARED_MEMORY).write_text("\n".join(map(str, sorted(self._seen))))

    def remove(self) -> None:
        """Remove everything; call this after the engine's last process has ended. Idempotent, from any thread."""
        with self._removal:
            if self._lock < 0:
                return
            _remove(self.folder, self._seen | _noted(self.folder))
            os.close(self._lock)
            self._lock = -1


def remove_orphans() -> list[Path]:
    """Remove what the engines of killed supervisors left behind; return their folders."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(_PREFIX + "*")):
        with _owned(folder) as owned:
            if not owned:
                continue
            left = _noted(folder)
            if not left & shared_memory_of(psutil.pids()):  # in use while its engine ends; the next start retries
                _remove(folder, left)
                found.append(folder)
    return found


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes have mapped; skip processes that ended or are not ours."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError), Path(f"/proc/{pid}/maps").open() as file:
            found.update(Path(line[line.index(_DEV_SHM) :].rstrip("\n")) for line in file if _DEV_SHM in line)
    return {path for path in found if not path.name.endswith("(deleted)")}


def _noted(folder: Path) -> set[Path]:
    """Return the shared memory recorded in a folder; ignore paths outside /dev/shm."""
    found: set[Path] = set()
    for notes in folder.glob(NOTES):
        with suppress(OSError, ValueError):
            found.update(Path(line) for line in notes.read_text().splitlines())
    return {path for path in found if path.parent == Path(_DEV_SHM)}


@contextmanager
def _owned(folder: Path) -> Iterator[bool]:
    """Yield True, and hold the folder's lock, if its owner is dead.

    Any user can create a folder of this name in /tmp, so only folders of this user count.
    """
    try:
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            yield False
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock)


def _remove(folder: Path, shared_memory: Iterable[Path]) -> None:
    for path in shared_memory:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

"""Do what costs before a token is drawn in processes that can be killed.

When the engine is about to listen it forks a zygote, which imports what the jobs need. For every job the zygote forks a
worker. The worker limits its own time and memory, does the job and ends. The kernel kills it at a limit, and then the
job's request alone is refused. A worker keeps nothing for the next job, so nothing has to be cleaned up after a kill.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import orjson

from .answers import Refusal
from .shares import KEPT, Places, Shares, current_client

logger = logging.getLogger(__name__)
MEMORY_BYTES = 2**30  # that a worker may have beyond the zygote's
_WALL = 3  # seconds for each second of CPU time, because workers share the cores with the engine
QUICK_S = 0.25  # of CPU time; an ordinary grammar needs a fifth of it
_NICE, _LONG_NICE, _HEAVY_NICE = 5, 10, 19  # where cores are few, the engine goes first, and light clients next
_GRACE_S = 5.0  # beyond a worker's own limit of time, after which its zygote is replaced
_MAX_VERDICTS = 1024
_CHUNK = 2**18


@dataclass(frozen=True)
class WorkerJob:
    """One kind of work.

    prepare: returns the function that does it, in the zygote. The function raises Refusal for a value that must not
    reach the engine. cpu_s: CPU time after which the worker is killed. too_costly: the message to the client then.
    read: makes the value of what the worker is sent.
    """

    prepare: Callable[[], Callable[[Any], None]]
    cpu_s: float
    too_costly: str
    read: Callable[[bytes], Any] = orjson.loads


class Admission:
    """Does jobs in forked workers, a few at a time, and remembers the last verdicts.

    A worker first has little CPU time. If it is killed, the job is done once more with all its time, in a place for
    long jobs and with a low priority, so that a few costly requests never hold all places.
    """

    def __init__(self, jobs: Mapping[str, WorkerJob], shares: Shares) -> None:
        self._jobs, self._shares = jobs, shares
        self._quick, self._long = (Places(at_a_time(cores()), shares, KEPT) for _ in range(2))
        self._verdicts: dict[bytes, asyncio.Task[Refusal | None]] = {}
        self._start()

    async def require(self, job: str, value: Any, param: str | None) -> None:
        """Return if `job` accepts the value; raise Refusal with its reason, or if the worker was killed."""
        payload = value if isinstance(value, bytes) else orjson.dumps(value)
        digest = await asyncio.to_thread(_digest, job, payload) if len(payload) > _CHUNK else _digest(job, payload)
        if (verdict := self._verdicts.get(digest)) is None:
            verdict = self._verdicts[digest] = asyncio.ensure_future(self._decide(digest, job, payload))
        # A client that disconnects does not stop the worker, so it must not make room for another one.
        if refusal := await asyncio.shield(verdict):
            raise Refusal(refusal.message, refusal.status, refusal.param or param, refusal.code)

    async def _decide(self, digest: bytes, job: str, payload: bytes) -> Refusal | None:
        answer = b""
        try:
            most_s = self._jobs[job].cpu_s
            light = self._shares.light(current_client.get())
            tries = ((self._quick, min(QUICK_S, most_s), _NICE), (self._long, most_s, _LONG_NICE))
            for places, cpu_s, nice in tries:
                async with places.place():
                    zygote, order = self.pid, f"{cpu_s} {nice if light else _HEAVY_NICE} {job}"
                    answer = await self._ask(order, payload, cpu_s)
                    if not answer and (self.pid != zygote or self._restarted()):
                        answer = await self._ask(order, payload, cpu_s)
                if answer:
                    break
        except Refusal as busy:
            return busy
        finally:
            if not answer:
                self._verdicts.pop(digest, None)  # it depends on the moment
            excess = len(self._verdicts) - _MAX_VERDICTS
            for old in [old for old, task in self._verdicts.items() if task.done()][: max(excess, 0)]:
                del self._verdicts[old]  # never a pending one: its callers wait for it
        refused = orjson.loads(answer)["refused"] if answer else [self._jobs[job].too_costly]
        return None if refused is None else Refusal(*refused)

    async def _ask(self, order: str, payload: bytes, cpu_s: float) -> bytes:
        """Return the worker's answer; nothing when it was killed, or does not even end by its own limits."""
        zygote = self.pid
        try:
            return await asyncio.wait_for(self._sent(order, payload), _WALL * cpu_s + _GRACE_S)
        except asyncio.TimeoutError:  # the zygote hangs, so it forks no worker
            if self.pid == zygote:  # and no other request has replaced it
                with suppress(ProcessLookupError):
                    os.kill(zygote, signal.SIGKILL)
                    os.waitid(os.P_PID, zygote, os.WEXITED | os.WNOWAIT)
            return b""

    async def _sent(self, order: str, payload: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # without a zygote the answer is empty, too
            socket.send_fds(self._zygote, [order.encode()], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(payload)
            writer.write_eof()
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()

    def _start(self) -> None:
        self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote.setblocking(False)
        self.pid = os.fork()
        if not self.pid:
            _serve(theirs, self._jobs)
        theirs.close()

    def _restarted(self) -> bool:
        """Start another zygote if this one was killed, and return True then."""
        with suppress(ChildProcessError):  # reaped elsewhere: it has ended, too
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                return False
        logger.warning("the process that forks the door's workers was killed; another one is started")
        self._zygote.close()
        self._start()
        return True


def at_a_time(cores: int) -> int:
    """Return the number of workers for jobs of a kind: at least two, so that an expensive one does not block others."""
    return max(2, min(8, cores // 16))


def threads_of(cores: int) -> int:
    """Return the threads that compile one grammar; more than eight gain nothing."""
    return max(1, min(8, cores // 8))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _serve(control: socket.socket, jobs: Mapping[str, WorkerJob]) -> NoReturn:
    """Fork a worker for every job that arrives, until the engine ends."""
    try:
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, which the engine drains after
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker becomes a zombie
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, 2**20)
        works = {name: job.prepare() for name, job in jobs.items()}
        gc.freeze()  # a worker copies no page that it only counts references in
        while True:
            order, descriptors, _, _ = socket.recv_fds(control, _CHUNK, 1)
            if not order:
                break
            if not os.fork():
                control.close()
                cpu_s, nice, name = order.decode().split(" ", 2)
                os.nice(int(nice))
                _work(descriptors[0], works[name], jobs[name].read, float(cpu_s))
            os.close(descriptors[0])
    except BaseException:
        logger.exception("the door's workers cannot be started")
    finally:
        os._exit(0)


def _work(descriptor: int, work: Callable[[Any], None], read: Callable[[bytes], Any], cpu_s: float) -> NoReturn:
    """Do one job within its limits, and write the verdict."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, _WALL * cpu_s)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_BYTES,) * 2)
    with suppress(MemoryError), socket.socket(fileno=descriptor) as connection:
        chunks = []
        while chunk := connection.recv(_CHUNK):
            chunks.append(chunk)
        refused: list[Any] | None = None
        try:
            work(read(b"".join(chunks)))
        except Refusal as refusal:
            refused = [refusal.message, refusal.status, refusal.param, refusal.code]
        except MemoryError:
            raise
        except Exception as error:
            logger.exception("a request cannot be checked")
            refused = [f"this request cannot be checked ({type(error).__name__})"]
        connection.sendall(orjson.dumps({"refused": refused}))
    os._exit(0)


def _digest(job: str, payload: bytes) -> bytes:
    digest = sha256(job.encode())
    digest.update(payload)
    return digest.digest()


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

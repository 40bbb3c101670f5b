"""Keep engines and SGLang's router running on this machine: started, restarted one by one, drained together.

One engine is a fleet of one: it has no router, and the fleet ends with it instead of starting it again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from ..base.errors import KimiError
from ..base.signals import Terminated
from ..engine.process import EngineServer
from ..ops.replica_state import FleetView, Phase, ReplicaState
from ..recipe.router_settings import RouterSettings
from .events import EventLog
from .registrar import Registrar
from .replica import READY_TIMEOUT_S, Replica, Stalled
from .router import RouterEndpoint, router_process

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5  # in a row, of one of several replicas
_MAX_BACKOFF_S = 30.0
_POLL_S = 0.25
_ROUTER_READY_S = 60.0
_ROUTER_STOP_S = 5.0
_REMOVAL_S = 30.0


class Kept(Protocol):
    """A process that is kept running. serve: runs it once; returns when it was asked to end, else raises KimiError."""

    label: str
    was_ready: bool

    def serve(self) -> None: ...


def keep(
    kept: Kept,
    ending: threading.Event,
    events: EventLog,
    failed: Callable[[Exception], None] = lambda error: None,
    limit: int | None = None,
) -> Exception | None:
    """Run a process again and again until `ending` is set; return the last error after `limit` failures in a row.

    failed: called before every new start. One that was ready starts at once, the next ones after 1, 2, 4 ... 30 s.
    """
    failures = 0
    while not ending.is_set():
        try:
            kept.serve()
            failures = 0
            continue
        except Exception as caught:
            error = caught
        if not isinstance(error, KimiError):  # a bug here must not cost the service this process
            logger.error("%s", kept.label, exc_info=error)
            events(kept.label, "down", f"{type(error).__name__}: {error}")
        if ending.is_set():
            return None
        failures = 1 if kept.was_ready else failures + 1
        if failures == limit:
            events(kept.label, "gave-up", "it is not started again")
            return error
        failed(error)
        pause = min(2.0 ** (failures - 2), _MAX_BACKOFF_S) if failures > 1 else 0.0
        events(kept.label, "restarting", f"in {pause:.0f} s")
        ending.wait(pause)
    return None


def ready_urls(replicas: Sequence[Replica]) -> frozenset[str]:
    """Return the addresses of the replicas that take requests now."""
    return frozenset(replica.state.base_url for replica in replicas if replica.state.ready)


class RouterKeeper:
    """The router's process, restarted whenever it ends, and its list of replicas; used as a context manager.

    wanted, model: see `Registrar`.
    """

    def __init__(
        self,
        endpoint: RouterEndpoint,
        settings: RouterSettings,
        wanted: Callable[[], frozenset[str]],
        events: EventLog,
        model: str | None = None,
        drain_timeout_s: float = 0.0,
    ) -> None:
        self.endpoint = endpoint
        self.registrar = Registrar(endpoint, wanted, events, model)
        self._process: EngineServer = router_process(endpoint, settings, events.folder / "router.log", drain_timeout_s)
        self._drain_timeout_s = drain_timeout_s
        self._events = events
        self.label, self.was_ready = "router", False
        self._end = threading.Event()
        self._thread = threading.Thread(target=keep, args=(self, self._end, events), name="router", daemon=True)

    def __enter__(self) -> RouterKeeper:
        self._start()  # here, so that a router that cannot start ends the command
        self._thread.start()
        self.registrar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.registrar.__exit__(*error)
        self._stop(_ROUTER_STOP_S)

    def drain(self) -> None:
        """Accept no new connection, finish the running requests, then end."""
        self._events("router", "draining", f"running requests may take {self._drain_timeout_s:.0f} s")
        self._stop(self._drain_timeout_s + _ROUTER_STOP_S)

    def _stop(self, grace_s: float) -> None:
        self._end.set()
        self._thread.join()
        self._process.stop(grace_s)

    def serve(self) -> None:
        """Watch the router's process, and start it first if it has ended."""
        try:
            if self._process.poll() is not None:
                self.was_ready = False
                self._start()
            while self._process.poll() is None:
                if self._end.wait(_POLL_S):
                    return
            raise KimiError(f"it ended with exit code {self._process.poll()}")
        except KimiError as error:
            self._events(self.label, "down", error.what)
            raise

    def _start(self) -> None:
        self._process.start()
        self._process.wait_ready(_ROUTER_READY_S)
        self.was_ready = True
        self._events(self.label, "ready", self._process.base_url)


class Fleet:
    """The replicas of one machine, and the router in front of several. view: for probes and metrics."""

    def __init__(
        self, recipe: str, replicas: Sequence[Replica], events: EventLog, router: RouterKeeper | None = None
    ) -> None:
        addresses = () if router is None else (router.endpoint.base_url, router.endpoint.metrics_url)
        self.view = FleetView(recipe, self.replicas, self.live, *addresses)
        self.renew = threading.Event()  # set it to restart all replicas, one after the other
        self._replicas = replicas
        self._events = events
        self._registrar = None if router is None else router.registrar
        self._max_failures = 1 if router is None else MAX_FAILED_STARTS
        self._ending = threading.Event()
        self._gave_up: dict[str, Exception] = {}

    def replicas(self) -> Sequence[ReplicaState]:
        return [replica.state for replica in self._replicas]

    def live(self) -> tuple[bool, str]:
        """Return False and the reason once the supervisor gave up on every replica."""
        if len(self._gave_up) < len(self._replicas):
            return True, ""
        error = self._final_error()
        return False, error.what if isinstance(error, KimiError) else repr(error)

    def run(self) -> None:
        """Serve until Terminated is raised in this thread; raise KimiError when no replica starts any more."""
        # Each in its own thread, because a child dies with the thread that started it.
        threads = [threading.Thread(target=self._keep, args=(replica,), daemon=True) for replica in self._replicas]
        for thread in threads:
            thread.start()
        try:
            while self.live()[0]:
                if self.renew.wait(_POLL_S):
                    self.renew.clear()
                    self.rolling_restart()
            raise self._final_error()
        except Terminated as ended:
            if ended.number == signal.SIGTERM:
                self._drain_all(threads)
            raise
        finally:
            self._end_all(threads)

    def rolling_restart(self) -> None:
        """Restart the replicas one after the other; each first leaves the router and finishes its requests.

        Stops at the first replica that does not come back. The remaining ones keep their old processes.
        """
        self._events("fleet", "rolling-restart", f"{len(self._replicas)} replicas, one after the other")
        for replica in self._replicas:
            state = replica.state
            if not state.ready:
                self._events("fleet", "rolling-restart", f"{replica.label} is {state.phase.value}: not restarted")
                continue
            if not any(s.ready for s in self.replicas() if s is not state):
                self._events("fleet", "rolling-restart", "given up: no other replica is ready")
                return
            self._leave_router(replica)
            state.restarts["rolling"] += 1
            replica.end()
            if not self._wait_back(replica):
                self._events("fleet", "rolling-restart", f"given up: {replica.label} did not come back")
                return
        self._events("fleet", "rolling-restart", "done")

    def _final_error(self) -> Exception:
        """Return the error of the only replica, or of all of them."""
        if len(self._replicas) == 1:
            return self._gave_up[self._replicas[0].label]
        what = f"no replica starts: {MAX_FAILED_STARTS} failures each in a row"
        return KimiError(what, where=str(self._replicas[0].log_path), remedy="read the end of that log")

    def _keep(self, replica: Replica) -> None:
        error = keep(replica, self._ending, self._events, partial(_count, replica), self._max_failures)
        if error is not None:
            self._gave_up[replica.label] = error

    def _routed(self, condition: Callable[[frozenset[str]], bool], timeout_s: float) -> bool:
        """Wait until the replicas that the router lists meet a condition; True without a router."""
        return self._registrar is None or self._registrar.wait_until(condition, timeout_s)

    def _leave_router(self, replica: Replica) -> None:
        """Remove a replica from the router's list and wait until it is gone."""
        url = replica.state.base_url
        replica.state.enter(Phase.DRAINING, "it leaves the router")
        self._routed(lambda urls: url not in urls, _REMOVAL_S)

    def _wait_back(self, replica: Replica) -> bool:
        """Wait until a restarted replica serves again and the router lists it."""
        url = replica.state.base_url
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end and replica.label not in self._gave_up:
            if replica.state.ready and self._routed(lambda urls: url in urls, _POLL_S):
                return True
            time.sleep(_POLL_S)
        return False

    def _drain_all(self, threads: Sequence[threading.Thread]) -> None:
        """Stop new requests to all replicas, then let the running ones finish."""
        self._ending.set()
        for replica in self._replicas:
            if replica.state.ready:
                replica.state.enter(Phase.DRAINING, "running requests finish")
        self._routed(lambda urls: not urls, _REMOVAL_S)
        for replica in self._replicas:
            if replica.was_ready:
                replica.end()
            else:  # it has no request, and its canary prompts may take minutes
                replica.end_now()
        for thread in threads:
            thread.join()

    def _end_all(self, threads: Sequence[threading.Thread]) -> None:
        self._ending.set()
        alive = [replica for replica, thread in zip(self._replicas, threads, strict=True) if thread.is_alive()]
        if alive:
            with ThreadPoolExecutor(len(alive)) as pool:
                list(pool.map(Replica.end_now, alive))
        for thread in threads:
            thread.join(timeout=30.0)


def _count(replica: Replica, error: Exception) -> None:
    reason = "stalled" if isinstance(error, Stalled) else "ended" if isinstance(error, KimiError) else "error"
    replica.state.restarts[reason] += 1

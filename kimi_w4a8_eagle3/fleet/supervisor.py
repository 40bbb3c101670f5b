"""Several replicas on this machine behind SGLang's router: kept alive, restarted one by one, drained together."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

MAX_FAILED_STARTS = 5  # in a row, of one replica
_MAX_BACKOFF_S = 30.0
_POLL_S = 0.25
_ROUTER_READY_S = 60.0
_ROUTER_STOP_S = 5.0
_REMOVAL_S = 30.0


class RouterKeeper:
    """The router's process, restarted whenever it ends; used as a context manager."""

    def __init__(
        self,
        endpoint: RouterEndpoint,
        settings: RouterSettings,
        folder: Path,
        events: EventLog,
        drain_timeout_s: float = 0.0,
    ) -> None:
        self._process: EngineServer = router_process(endpoint, settings, folder / "router.log", drain_timeout_s)
        self._drain_timeout_s = drain_timeout_s
        self._events = events
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="router", daemon=True)

    def __enter__(self) -> RouterKeeper:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(_ROUTER_STOP_S)

    def drain(self) -> None:
        """Accept no new connection, finish the running requests, then end."""
        self._events("router", "draining", f"running requests may take {self._drain_timeout_s:.0f} s")
        self._stop(self._drain_timeout_s + _ROUTER_STOP_S)

    def _stop(self, grace_s: float) -> None:
        self._end.set()
        self._thread.join()
        self._process.stop(grace_s)

    def _start(self) -> None:
        self._process.start()
        self._process.wait_ready(_ROUTER_READY_S)
        self._events("router", "ready", self._process.base_url)

    def _keep(self) -> None:
        backoff = 0.5
        while not self._end.wait(_POLL_S):
            code = self._process.poll()
            if code is None:
                continue
            self._events("router", "down", f"exit code {code}; restarting it")
            try:
                self._start()
                backoff = 0.5
            except KimiError as error:
                self._events("router", "down", error.what)
                self._end.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_S)


class Fleet:
    """The replicas and the router of one machine. view: for probes and metrics."""

    def __init__(self, recipe: str, replicas: Sequence[Replica], endpoint: RouterEndpoint, events: EventLog) -> None:
        self.view = FleetView(recipe, self.replicas, self.live, endpoint.base_url, endpoint.metrics_url)
        self.renew = threading.Event()  # set it to restart all replicas, one after the other
        self._replicas = replicas
        self._events = events
        self._ending = threading.Event()
        self._gave_up: set[str] = set()
        self.registrar = Registrar(endpoint, self._wanted, events)

    def replicas(self) -> Sequence[ReplicaState]:
        return [replica.state for replica in self._replicas]

    def live(self) -> tuple[bool, str]:
        """Return False and the reason once the supervisor gave up on every replica."""
        if len(self._gave_up) == len(self._replicas):
            return False, f"no replica starts: {MAX_FAILED_STARTS} failures each in a row"
        return True, ""

    def run(self) -> None:
        """Serve until Terminated is raised in this thread; raise KimiError when no replica starts any more."""
        threads = [threading.Thread(target=self._keep, args=(replica,), daemon=True) for replica in self._replicas]
        for thread in threads:
            thread.start()
        try:
            while self.live()[0]:
                if self.renew.wait(_POLL_S):
                    self.renew.clear()
                    self.rolling_restart()
            raise KimiError(self.live()[1], where=str(self._replicas[0].log_path), remedy="read the end of that log")
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
            if len(self._replicas) > 1 and not any(s.ready for s in self.replicas() if s is not state):
                self._events("fleet", "rolling-restart", "given up: no other replica is ready")
                return
            self._leave_router(replica)
            state.restarts["rolling"] += 1
            replica.end()
            if not self._wait_back(replica):
                self._events("fleet", "rolling-restart", f"given up: {replica.label} did not come back")
                return
        self._events("fleet", "rolling-restart", "done")

    def _wanted(self) -> frozenset[str]:
        return frozenset(replica.state.base_url for replica in self._replicas if replica.state.ready)

    def _keep(self, replica: Replica) -> None:
        """Run one replica again and again, in its own thread: a child dies with the thread that started it."""
        failures = 0
        while not self._ending.is_set():
            try:
                replica.serve()
                failures = 0
                continue
            except KimiError as error:
                reason = "stalled" if isinstance(error, Stalled) else "ended"
            except Exception as error:  # a bug here must not cost the service this replica
                logger.exception("%s", replica.label)
                self._events(replica.label, "down", f"{type(error).__name__}: {error}")
                reason = "error"
            if self._ending.is_set():
                return
            failures = 1 if replica.was_ready else failures + 1
            if failures >= MAX_FAILED_STARTS:
                self._gave_up.add(replica.label)
                self._events(replica.label, "gave-up", f"{failures} starts in a row failed; see {replica.log_path}")
                return
            replica.state.restarts[reason] += 1
            pause = min(2.0 ** (failures - 1), _MAX_BACKOFF_S)
            self._events(replica.label, "restarting", f"in {pause:.0f} s")
            self._ending.wait(pause)

    def _leave_router(self, replica: Replica) -> None:
        """Remove a replica from the router's list and wait until it is gone."""
        url = replica.state.base_url
        replica.state.enter(Phase.DRAINING, "it leaves the router")
        self.registrar.wait_until(lambda urls: url not in urls, _REMOVAL_S)

    def _wait_back(self, replica: Replica) -> bool:
        """Wait until a restarted replica serves again and the router lists it."""
        url = replica.state.base_url
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end and replica.label not in self._gave_up:
            if replica.state.ready and self.registrar.wait_until(lambda urls: url in urls, _POLL_S):
                return True
            time.sleep(_POLL_S)
        return False

    def _drain_all(self, threads: Sequence[threading.Thread]) -> None:
        """Stop new requests to all replicas, then let the running ones finish."""
        self._ending.set()
        for replica in self._replicas:
            if replica.state.ready:
                replica.state.enter(Phase.DRAINING, "it leaves the router")
        self.registrar.wait_until(lambda urls: not urls, _REMOVAL_S)
        for replica in self._replicas:
            replica.end()
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

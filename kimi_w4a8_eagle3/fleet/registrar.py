"""Keep the router running, and its list of replicas correct: ready replicas that serve the same model and weights.

One loop compares the wanted replicas with the router's list and applies the difference. It needs no special case for a
router that restarted and forgot everything, a replica that came back, or one that drains.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import httpx

from ..base.errors import KimiError
from ..base.http import trusted
from ..base.run_dir import EventLog
from ..engine.process import EngineServer
from ..recipe.router_settings import RouterSettings
from .identity import Identity, ask_identity
from .replica import keep
from .router import RouterControl, RouterEndpoint, router_process

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
_READY_S = 60.0
_STOP_S = 5.0
_IDENTITY_TIMEOUT_S = 5.0
_RECHECK_S = 3.0  # a pod may end, or come back at the same address with another model


@dataclass
class _Checked:
    at: float
    accepted: bool


class Registrar:
    """Registers replicas with the router at `endpoint` and removes them again.

    wanted: base URLs of the replicas that should take requests now. model: the name they must serve; None takes the
    first replica's name. A replica whose identity differs from the first one's is refused while that one, or another
    with its identity, is registered.
    """

    def __init__(
        self, endpoint: RouterEndpoint, wanted: Callable[[], frozenset[str]], events: EventLog, model: str | None = None
    ) -> None:
        self._control = RouterControl(endpoint)
        self._engines = httpx.Client(timeout=_IDENTITY_TIMEOUT_S, verify=trusted())
        self._wanted = wanted
        self._events = events
        self._model = model
        self._expected: Identity | None = None
        self._admitted: set[str] = set()  # weights beside the expected ones
        self._checks: dict[str, _Checked] = {}
        self._workers = frozenset[str]()
        self._passed = threading.Condition()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def registered(self) -> frozenset[str]:
        """Return the base URLs that the router listed at the last pass."""
        return self._workers

    def wait_until(self, condition: Callable[[frozenset[str]], bool], timeout_s: float) -> bool:
        """Wait until the registered URLs meet a condition; return False after the timeout."""
        with self._passed:
            return self._passed.wait_for(lambda: condition(self.registered()), timeout_s)

    def admit(self, weights: Collection[str]) -> None:
        """Accept replicas with these weights, too: a rolling restart brings them one after the other."""
        self._admitted |= set(weights)

    def reconcile(self) -> None:
        """Run one pass; nothing changes when the router does not answer."""
        try:
            self._mend()
        except httpx.HTTPError:
            self._workers = frozenset()
        except Exception as error:  # a bug here must not freeze the router's list
            logger.error("the router's list of replicas was not updated", exc_info=error)
        with self._passed:
            self._passed.notify_all()

    def __enter__(self) -> Registrar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=30.0)
        self._control.close()
        self._engines.close()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self.reconcile()

    def _mend(self) -> None:
        wanted = self._wanted()
        self._checks = {url: check for url, check in self._checks.items() if url in wanted}
        listed = self._control.workers()
        accepted = {url for url in sorted(wanted) if self._accepts(url, url in listed)}
        if not accepted and not listed:
            self._expected = None  # the next replica sets the identity anew
        for url in sorted(listed.keys() - accepted):
            self._control.remove(listed[url])
        for url in sorted(accepted - listed.keys()):
            self._control.add(url)
        for event, urls in (("registered", listed.keys() - self._workers), ("removed", self._workers - listed.keys())):
            for url in sorted(urls):
                self._events("router", event, url)
        self._workers = frozenset(listed)

    def _accepts(self, url: str, is_listed: bool) -> bool:
        """Return True if the replica answers and has the expected identity; a slow one keeps its place."""
        check = self._checks.get(url)
        if check is not None and time.monotonic() - check.at < _RECHECK_S:
            return check.accepted
        try:
            reason = self._objection(ask_identity(url, self._engines))
        except httpx.HTTPStatusError as error:
            reason = f"it answers HTTP {error.response.status_code} to /model_info"
        except httpx.ConnectError:
            return False  # nothing listens there any more; do not wait for the router's health check
        except httpx.HTTPError:
            return is_listed  # it may be busy
        except KimiError as error:
            reason = error.what
        if reason and (check is None or check.accepted):
            self._events("router", "refused", f"{url}: {reason}")
        self._checks[url] = _Checked(time.monotonic(), accepted=not reason)
        return not reason

    def _objection(self, found: Identity) -> str:
        """Return the reason to refuse a replica; empty when there is none."""
        if self._model is not None and found.model != self._model:
            return f"it serves {found.model!r}, this router is for {self._model!r}"
        if self._expected is None:
            self._expected = found
        if found.weights in self._admitted:
            found = replace(found, weights=self._expected.weights)
        return ", ".join(self._expected.differences(found))


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
        self._stop(_STOP_S)

    def drain(self) -> None:
        """Accept no new connection, finish the running requests, then end."""
        self._events("router", "draining", f"running requests may take {self._drain_timeout_s:.0f} s")
        self._stop(self._drain_timeout_s + _STOP_S)

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
                if self._end.wait(INTERVAL_S):
                    return
            raise KimiError(f"it ended with exit code {self._process.poll()}")
        except KimiError as error:
            self._events(self.label, "down", error.what)
            raise

    def _start(self) -> None:
        self._process.start()
        self._process.wait_ready(_READY_S)
        self.was_ready = True
        self._events(self.label, "ready", self._process.base_url)

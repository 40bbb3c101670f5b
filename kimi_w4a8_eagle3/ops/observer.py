"""Watches the metrics of a fleet: the acceptance windows of its replicas, and one exposition of everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import httpx

from ..base.prometheus import Reading
from ..engine.metrics import Acceptance
from .exposition import Source, merge, render
from .fleet_metrics import fleet_families
from .replica_state import FleetView, ReplicaState
from .scrape import TIMEOUT_S, Families, scrape, scrape_all
from .window import AcceptanceWindow, SpecTotals


class FleetObserver:
    """Reads engines and router; `sample` is to be called every few seconds, from one task.

    timeout_s: what a process may take to answer before it is left out. The view is asked in the event loop's thread
    only, the work is done in others.
    """

    def __init__(self, view: FleetView, timeout_s: float = TIMEOUT_S) -> None:
        self._view = view
        self._timeout_s = timeout_s
        self._windows: dict[str, AcceptanceWindow] = {}

    def acceptance(self, replica: str) -> Acceptance | None:
        """Acceptance of a replica over the last minute; None when no verify step fell in it. For any thread."""
        window = self._windows.get(replica)
        return None if window is None else window.acceptance(time.monotonic())

    async def sample(self, client: httpx.AsyncClient) -> None:
        """Feed the windows with what the engines count now."""
        replicas = self._view.replicas()
        expositions = await scrape_all(client, _urls(replicas), self._timeout_s)
        await asyncio.to_thread(self._add, replicas, expositions)

    async def exposition(self, client: httpx.AsyncClient) -> bytes:
        """The merged exposition of replicas, router and supervisor, read now."""
        replicas = self._view.replicas()
        router, engines = await asyncio.gather(
            scrape(client, self._view.router_metrics_url, self._timeout_s),
            scrape_all(client, _urls(replicas), self._timeout_s),
        )
        return await asyncio.to_thread(self._merged, replicas, engines, router or ())

    def _add(self, replicas: Sequence[ReplicaState], expositions: Mapping[str, Families]) -> None:
        now = time.monotonic()
        for replica in replicas:
            if replica.name in expositions:
                window = self._windows.setdefault(replica.name, AcceptanceWindow(replica.num_draft_tokens))
                window.add(now, SpecTotals.of(Reading.of(expositions[replica.name])))

    def _merged(self, replicas: Sequence[ReplicaState], engines: Mapping[str, Families], router: Families) -> bytes:
        recent = {replica.name: self.acceptance(replica.name) for replica in replicas}
        sources = [Source(tuple(fleet_families(self._view.recipe, replicas, recent, engines)))]
        sources += [Source(families, {"replica": name}) for name, families in engines.items()]
        return render(merge([*sources, Source(router)]))


def _urls(replicas: Sequence[ReplicaState]) -> dict[str, str]:
    return {replica.name: f"{replica.base_url}/metrics" for replica in replicas}

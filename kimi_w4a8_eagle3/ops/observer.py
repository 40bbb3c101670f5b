"""Watches the metrics of a fleet: the acceptance windows of its replicas, and one exposition of everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import httpx

from ..metrics import Acceptance
from .exposition import Source, merge, render
from .fleet_metrics import fleet_families
from .scrape import TIMEOUT_S, Families, scrape, scrape_all
from .state import FleetView
from .window import AcceptanceWindow, SpecTotals


class FleetObserver:
    """Reads engines and router; `sample` is to be called every few seconds, from one task.

    timeout_s: what a process may take to answer before it is left out.
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
        expositions = await scrape_all(client, self._urls(), self._timeout_s)
        await asyncio.to_thread(self._add, expositions)

    async def exposition(self, client: httpx.AsyncClient) -> bytes:
        """The merged exposition of replicas, router and supervisor, read now."""
        router, engines = await asyncio.gather(
            scrape(client, self._view.router_metrics_url, self._timeout_s),
            scrape_all(client, self._urls(), self._timeout_s),
        )
        return await asyncio.to_thread(self._merged, engines, router or ())

    def _urls(self) -> dict[str, str]:
        return {replica.name: f"{replica.base_url}/metrics" for replica in self._view.replicas()}

    def _add(self, expositions: Mapping[str, Families]) -> None:
        now = time.monotonic()
        for replica in self._view.replicas():
            if replica.name in expositions:
                window = self._windows.setdefault(replica.name, AcceptanceWindow(replica.num_draft_tokens))
                window.add(now, SpecTotals.of(expositions[replica.name]))

    def _merged(self, engines: Mapping[str, Families], router: Families) -> bytes:
        recent = {replica.name: self.acceptance(replica.name) for replica in self._view.replicas()}
        sources = [Source(tuple(fleet_families(self._view, recent, engines)))]
        sources += [Source(families, {"replica": name}) for name, families in engines.items()]
        return render(merge([*sources, Source(router)]))

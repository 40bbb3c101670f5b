"""Observe the metrics of a fleet: acceptance windows of its replicas, and one merged exposition.

Expositions cannot be concatenated, because each family may be declared only once, with all its samples in one group.
prometheus_client reads and writes them; this module only regroups samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ..base.prometheus import Reading, parse
from ..base.tls import trusted
from ..engine.metrics import FAILED_REQUESTS, NAN_LOGITS, Acceptance
from .figures import Figures, FiguresWindow
from .fleet_metrics import fleet_families
from .replica_state import FleetView, ReplicaState
from .window import AcceptanceWindow, SpecTotals

TIMEOUT_S = 1.5  # in total; a busy engine answers in tens of milliseconds, a stopped one never

Families = tuple[Metric, ...]


def new_client() -> httpx.AsyncClient:
    """Return a client for engines and router, which are near and need no proxy from the environment."""
    return httpx.AsyncClient(trust_env=False, follow_redirects=True, timeout=None, verify=trusted())  # noqa: S113 - `scrape` bounds all of it


async def scrape(client: httpx.AsyncClient, url: str | None, timeout_s: float) -> Families | None:
    """Read the families at `url`; None without a URL, or when no valid exposition came in time."""
    if url is None:
        return None
    try:
        response = await asyncio.wait_for(client.get(url), timeout_s)
        response.raise_for_status()
        return await asyncio.to_thread(parse, response.text)  # takes tens of milliseconds, which probes must not wait
    except (httpx.HTTPError, httpx.InvalidURL, asyncio.TimeoutError, ValueError):
        return None


async def scrape_all(client: httpx.AsyncClient, urls: Mapping[str, str], timeout_s: float) -> dict[str, Families]:
    """Read expositions by name; a process that does not answer is left out and does not delay the others."""
    answers = await asyncio.gather(*(scrape(client, url, timeout_s) for url in urls.values()))
    return {name: families for name, families in zip(urls, answers, strict=True) if families is not None}


class FleetObserver:
    """Reads engines and router. One task calls `sample` every few seconds.

    timeout_s: time limit for a process before it is left out. The event loop's thread alone reads the view; other
    threads do the parsing and merging.
    """

    def __init__(self, view: FleetView, timeout_s: float = TIMEOUT_S) -> None:
        self._view = view
        self._timeout_s = timeout_s
        self._windows: dict[str, AcceptanceWindow] = {}
        self._loads: dict[str, FiguresWindow] = {}

    def acceptance(self, replica: str) -> Acceptance | None:
        """Return a replica's acceptance over the last minute; None when no verify step fell in it. Thread-safe."""
        window = self._windows.get(replica)
        return None if window is None else window.acceptance(time.monotonic())

    def figures(self, replica: str) -> Figures | None:
        """Return a replica's load over the last half minute; None when it does not answer. Thread-safe."""
        window = self._loads.get(replica)
        return None if window is None else window.figures(time.monotonic())

    async def sample(self, client: httpx.AsyncClient) -> None:
        """Add the engines' current counters to the windows."""
        replicas = self._view.replicas()
        expositions = await scrape_all(client, _urls(replicas), self._timeout_s)
        await asyncio.to_thread(self._add, replicas, expositions)

    async def exposition(self, client: httpx.AsyncClient) -> bytes:
        """Read and merge the expositions of replicas, router and supervisor now."""
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
                reading = Reading.of(expositions[replica.name])
                window.add(now, SpecTotals.of(reading))
                self._loads.setdefault(replica.name, FiguresWindow()).add(now, reading)
                replica.alarms = sum(reading.total(name) or 0.0 for name in (NAN_LOGITS, FAILED_REQUESTS))

    def _merged(self, replicas: Sequence[ReplicaState], engines: Mapping[str, Families], router: Families) -> bytes:
        recent = {replica.name: self.acceptance(replica.name) for replica in replicas}
        sources = [Exposition(tuple(fleet_families(self._view.recipe, replicas, recent, engines)))]
        sources += [Exposition(families, {"replica": name}) for name, families in engines.items()]
        return render(merge([*sources, Exposition(router)]))


def _urls(replicas: Sequence[ReplicaState]) -> dict[str, str]:
    return {replica.name: f"{replica.base_url}/metrics" for replica in replicas}


@dataclass(frozen=True)
class Exposition:
    """One process's exposition; `labels` are added to all its samples."""

    families: tuple[Metric, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


def merge(sources: Iterable[Exposition]) -> list[Metric]:
    """Merge families of all sources by name, in the order in which they first appear.

    A label of the same name in the source becomes `exported_NAME`, as in Prometheus' own scrapes. The first source
    decides a family's type and help. A family of another type under that name is left out, because a mix would make the
    whole exposition invalid. So is a series that its source repeats.
    """
    merged: dict[str, Metric] = {}
    for source in sources:
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for family in source.families:
            empty = Metric(family.name, family.documentation, family.type)
            target = merged.setdefault(_exposed_name(family), empty)
            if target.type != family.type:
                continue
            for sample in family.samples:
                labelled = _labelled(sample, source.labels)
                series = (labelled.name, frozenset(labelled.labels.items()))
                if series not in seen:
                    seen.add(series)
                    target.samples.append(labelled)
    return list(merged.values())


def render(families: Iterable[Metric]) -> bytes:
    """Render families as Prometheus text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _exposed_name(family: Metric) -> str:
    """Return the name in the text; prometheus_client stores counters without `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    if not labels:
        return sample
    own = {f"exported_{name}" if name in labels else name: value for name, value in sample.labels.items()}
    return sample._replace(labels={**own, **labels})

"""The fleet that is soaked: one that runs already, or a `ServedFleet` that was started for it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import psutil

from ..load.served import ServedFleet
from .processes import ProcessTree, serving_process
from .watch import engines


@dataclass(frozen=True)
class Subject:
    """url: the API. ops_url: probes and metrics. tree: None when no process of this machine listens there."""

    url: str
    ops_url: str
    tree: ProcessTree | None


def running(url: str, ops_url: str | None) -> Subject:
    """A fleet that the operator started; without `ops_url` its ops endpoint is on the port after the API's."""
    parts = urlsplit(url)
    ops_url = ops_url or f"{parts.scheme}://{parts.hostname}:{(parts.port or 80) + 1}"
    return _subject(url.rstrip("/"), ops_url, serving_process(url))


def started(fleet: ServedFleet) -> Subject:
    """A fleet that is ready."""
    return _subject(fleet.base_url, fleet.ops_url, psutil.Process(fleet.process.pid))


def _subject(url: str, ops_url: str, root: psutil.Process | None) -> Subject:
    with httpx.Client(timeout=10.0, trust_env=False) as http:
        ports = {urlsplit(address).port or 80: name for name, address in engines(http, ops_url).items()}
    return Subject(url, ops_url, None if root is None else ProcessTree(root, ports))

"""Reads the expositions of several processes at once, each given the same short time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx
from prometheus_client.metrics_core import Metric

from ..base.prometheus import parse

TIMEOUT_S = 1.5  # in all; a busy engine answers in tens of milliseconds, a stopped one never

Families = tuple[Metric, ...]


def new_client() -> httpx.AsyncClient:
    """A client for engines and router: they are near, so no proxy of the environment is asked."""
    return httpx.AsyncClient(trust_env=False, follow_redirects=True, timeout=None)  # noqa: S113 - `scrape` bounds all of it


async def scrape(client: httpx.AsyncClient, url: str | None, timeout_s: float) -> Families | None:
    """The families of the exposition at `url`; None without a URL, or when no exposition came in time."""
    if url is None:
        return None
    try:
        response = await asyncio.wait_for(client.get(url), timeout_s)
        response.raise_for_status()
        return await asyncio.to_thread(parse, response.text)  # tens of milliseconds: probes must not wait for it
    except (httpx.HTTPError, httpx.InvalidURL, asyncio.TimeoutError, ValueError):
        return None


async def scrape_all(client: httpx.AsyncClient, urls: Mapping[str, str], timeout_s: float) -> dict[str, Families]:
    """The expositions by name; a process that does not answer is left out and delays no other."""
    answers = await asyncio.gather(*(scrape(client, url, timeout_s) for url in urls.values()))
    return {name: families for name, families in zip(urls, answers, strict=True) if families is not None}

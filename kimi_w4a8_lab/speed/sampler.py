"""Peaks of the server's own gauges during a load, read in the background."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.metrics import read_once

_GAUGES = {"kv_usage": "sglang:token_usage", "running": "sglang:num_running_reqs", "queued": "sglang:num_queue_reqs"}


@dataclass(frozen=True)
class ServerPeaks:
    """Peaks of one measuring window: share of the KV pool, and requests that ran and waited. retracted: requests.

    SGLang refreshes the gauges every 40 decode steps by default, so short runs see few values.
    """

    kv_usage: float
    running: float
    queued: float
    retracted: float


class Sampler:
    """Reader of /metrics, once in `every_s` seconds. Peaks count from `open_window`."""

    def __init__(self, base_url: str, every_s: float = 1.0) -> None:
        self._base_url, self._every_s = base_url, every_s
        self._peaks = dict.fromkeys(_GAUGES, 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=15.0)

    def open_window(self) -> None:
        self._peaks = dict.fromkeys(_GAUGES, 0.0)

    def peaks(self, retracted: float) -> ServerPeaks:
        return ServerPeaks(**self._peaks, retracted=retracted)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                now = read_once(self._base_url, timeout_s=10.0)
            except KimiError:
                continue  # a dead server shows in the load's own result
            for name, gauge in _GAUGES.items():
                self._peaks[name] = max(self._peaks[name], now.largest(gauge) or 0.0)

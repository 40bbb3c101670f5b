"""The server's own metrics during a load: gauges sampled in the background, and counters before and after."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.prometheus import Reading

from ..base.counters import read

GAUGES = {
    "kv_usage": "sglang:token_usage",
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
    "draft_steps": "sglang:spec_num_steps",
}
_PEAKS = ("kv_usage", "running", "queued")
_RETRACTED = "sglang:num_retracted_requests_total"


@dataclass(frozen=True)
class ServerSummary:
    """Summary of one measuring window.

    kv_usage_peak: largest share of the KV pool in use. samples: readings of the gauges. SGLang refreshes them every 40
    decode steps by default, so short runs see few values. draft_steps: mean while requests ran.
    """

    samples: int
    kv_usage_peak: float
    running_peak: float
    queued_peak: float
    retracted: float
    draft_steps: float | None = None


class Sampler:
    """Background reader of /metrics, every `every_s` seconds from `open_window()` to exit; writes JSON to `path`."""

    def __init__(self, base_url: str, path: Path, every_s: float = 1.0) -> None:
        self._base_url, self._path, self._every_s = base_url, path, every_s
        self._readings: list[dict[str, float]] = []
        self._first = Reading.of(())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=15.0)
        lines = "".join(json.dumps(reading) + "\n" for reading in self._readings)
        self._path.write_text(lines)

    def open_window(self) -> None:
        self._first = read(self._base_url)
        self._readings.clear()

    def summary(self) -> ServerSummary:
        """Summarize the time since `open_window`. Raises KimiError when the server does not answer."""
        return summarize(self._first, read(self._base_url), self._readings)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                now = read(self._base_url, attempts=1)
            except KimiError:
                continue  # a dead server shows in the load's own result
            found = {name: value for name, gauge in GAUGES.items() if (value := now.largest(gauge)) is not None}
            self._readings.append({"time": time.time(), **found})


def summarize(first: Reading, last: Reading, readings: Sequence[Mapping[str, float]]) -> ServerSummary:
    steps = [reading["draft_steps"] for reading in readings if "draft_steps" in reading and reading.get("running")]
    peaks = {f"{gauge}_peak": max((one.get(gauge, 0.0) for one in readings), default=0.0) for gauge in _PEAKS}
    return ServerSummary(
        samples=len(readings),
        **peaks,
        retracted=(last.total(_RETRACTED) or 0.0) - (first.total(_RETRACTED) or 0.0),
        draft_steps=sum(steps) / len(steps) if steps else None,
    )

"""The server's own gauges during a load, sampled in the background."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kimi_w4a8_eagle3.base.errors import KimiError

from ..base.counters import read

GAUGES = {
    "kv_usage": "sglang:token_usage",
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
    "draft_steps": "sglang:spec_num_steps",
}
_PEAKS = ("kv_usage", "running", "queued")


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
    """Background reader of /metrics, once in `every_s` seconds. It writes `path`. readings: since `open_window`."""

    def __init__(self, base_url: str, path: Path, every_s: float = 1.0) -> None:
        self._base_url, self._path, self._every_s = base_url, path, every_s
        self.readings: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=15.0)
        lines = "".join(json.dumps(reading) + "\n" for reading in self.readings)
        self._path.write_text(lines)

    def open_window(self) -> None:
        self.readings.clear()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                now = read(self._base_url, attempts=1)
            except KimiError:
                continue  # a dead server shows in the load's own result
            found = {name: value for name, gauge in GAUGES.items() if (value := now.largest(gauge)) is not None}
            self.readings.append({"time": time.time(), **found})


def summarize(readings: Sequence[Mapping[str, float]], retracted: float = 0.0) -> ServerSummary:
    steps = [reading["draft_steps"] for reading in readings if "draft_steps" in reading and reading.get("running")]
    peaks = {f"{gauge}_peak": max((one.get(gauge, 0.0) for one in readings), default=0.0) for gauge in _PEAKS}
    return ServerSummary(
        samples=len(readings),
        **peaks,
        retracted=retracted,
        draft_steps=sum(steps) / len(steps) if steps else None,
    )

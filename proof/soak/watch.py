"""Samples a fleet every few seconds while a soak runs: its processes, its engines' KV slots and queues."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError

from .processes import Held, ProcessTree

_TIMEOUT_S = 10.0
# As the engines report them at /v1/loads, which is always current; gauges of /metrics rest while an engine is idle.
USED, RUNNING, WAITING = "num_used_tokens", "num_running_reqs", "num_waiting_reqs"


@dataclass(frozen=True)
class SoakSample:
    """One look. at: Unix seconds. engines: replica -> what it reports; absent when it did not answer."""

    at: float
    held: Mapping[str, Held]
    engines: Mapping[str, Mapping[str, float]]
    shared_memory: int


class Watch:
    """Samples every `every_s` seconds between entry and exit of a `with` block; each sample is a JSON line of `path`.

    tree: None when the fleet runs on another machine.
    """

    def __init__(self, ops_url: str, tree: ProcessTree | None, path: Path, every_s: float = 5.0) -> None:
        self._ops_url, self._tree, self._path, self._every_s = ops_url, tree, path, every_s
        self._http = httpx.Client(timeout=_TIMEOUT_S, trust_env=False)
        self._engines = engines(self._http, ops_url)
        self.samples: list[SoakSample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()

    def look(self) -> SoakSample:
        return SoakSample(
            at=time.time(),
            held=self._tree.held() if self._tree else {},
            engines={name: found for name, url in self._engines.items() if (found := self._engine(url)) is not None},
            shared_memory=len(self._tree.shared_memory()) if self._tree else 0,
        )

    def _run(self) -> None:
        with self._path.open("w") as file:
            while not self._stop.is_set():
                began = time.monotonic()
                sample = self.look()
                self.samples.append(sample)
                file.write(json.dumps(asdict(sample)) + "\n")
                file.flush()
                self._stop.wait(max(0.0, began + self._every_s - time.monotonic()))

    def _engine(self, url: str) -> dict[str, float] | None:
        with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            loads = self._http.get(f"{url}/v1/loads").raise_for_status().json()["loads"]
            return {name: float(sum(load[name] for load in loads)) for name in (USED, RUNNING, WAITING)}
        return None


def engines(http: httpx.Client, ops_url: str) -> dict[str, str]:
    """Addresses of the fleet's engines by `replica-NAME`; KimiError when its ops endpoint does not tell."""
    try:
        replicas = http.get(f"{ops_url}/status").raise_for_status().json()["replicas"]
        return {f"replica-{replica['name']}": str(replica["base_url"]) for replica in replicas}
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise KimiError(
            f"the fleet's ops endpoint does not answer: {error or type(error).__name__}",
            where=f"{ops_url}/status",
            expected="`kimi-w4a8 serve` with probes and metrics (--ops-port other than 0)",
        ) from error

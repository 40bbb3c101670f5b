"""Samples a fleet every few seconds while a soak runs: its processes, its engines' KV slots and queues."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from kimi_w4a8_eagle3.base.errors import KimiError

from ..load.engine_loads import engine_loads
from .processes import Held, ProcessTree

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SoakSample:
    """One look. at: Unix seconds. engines: replica -> what it reports; absent when it did not answer."""

    at: float
    held: Mapping[str, Held]
    engines: Mapping[str, Mapping[str, int]]
    shared_memory: int


class Watch:
    """Samples every `every_s` seconds between entry and exit of a `with` block; each sample is a JSON line of `path`.

    root: `kimi-w4a8 serve`; None when the fleet runs on another machine.
    """

    def __init__(self, ops_url: str, root: psutil.Process | None, path: Path, every_s: float = 5.0) -> None:
        self._engines, self._path, self._every_s = engines(ops_url), path, every_s
        ports = {urlsplit(url).port or 80: name for name, url in self._engines.items()}
        self._tree = None if root is None else ProcessTree(root, ports)
        self.samples: list[SoakSample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> SoakSample:
        return SoakSample(
            at=time.time(),
            held=self._tree.held() if self._tree else {},
            engines={name: found for name, url in self._engines.items() if (found := _loads(url)) is not None},
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


def _loads(url: str) -> dict[str, int] | None:
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        return engine_loads(url, _TIMEOUT_S)
    return None


def engines(ops_url: str) -> dict[str, str]:
    """Return the addresses of the fleet's engines by `replica-NAME`; KimiError when its ops endpoint does not tell."""
    try:
        status = httpx.get(f"{ops_url}/status", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().json()
        return {f"replica-{replica['name']}": str(replica["base_url"]) for replica in status["replicas"]}
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise KimiError(
            f"the fleet's ops endpoint does not answer: {error or type(error).__name__}",
            where=f"{ops_url}/status",
            expected="`kimi-w4a8 serve` with probes and metrics (--ops-port other than 0)",
        ) from error

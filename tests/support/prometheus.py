"""A real Prometheus that scrapes one endpoint every second and evaluates our rules."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.waiting import until

from kimi_w4a8_eagle3.engine.process import free_port

# One Debian package has both programs.
NEEDS_PROMETHEUS = "needs promtool and prometheus (apt-get install prometheus)"
installed = pytest.mark.skipif(not (shutil.which("promtool") and shutil.which("prometheus")), reason=NEEDS_PROMETHEUS)
RULES = Path(__file__).parents[2] / "launch" / "prometheus" / "rules" / "kimi.rules.yml"
_START_S = 60.0


def needs_prometheus(test: Callable[..., Any]) -> Any:
    """Mark a test for `make test-all`, on a machine that has the programs."""
    return pytest.mark.slow(installed(test))


@dataclass(frozen=True)
class Prometheus:
    """A client of its HTTP API."""

    base_url: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        """An instant vector; raises with Prometheus' own words when the expression is wrong."""
        return self._result("query", {"query": expr})

    def history(self, expr: str, span_s: float = 600.0) -> list[dict[str, Any]]:
        """Return the series of the last minutes, which a panel draws."""
        now = time.time()
        return self._result("query_range", {"query": expr, "start": now - span_s, "end": now, "step": 2})

    def value(self, expr: str) -> float:
        """Return the value of the only series."""
        (series,) = self.query(expr)
        return float(series["value"][1])

    def _result(self, what: str, data: dict[str, Any]) -> list[dict[str, Any]]:
        answer = httpx.post(f"{self.base_url}/api/v1/{what}", data=data, timeout=30).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {data['query']}"
        return list(answer["data"]["result"])


@contextmanager
def prometheus(target_url: str, folder: Path, *others: str) -> Iterator[Prometheus]:
    """Started and ended; its data and log stay in the folder."""
    targets = [url.removeprefix("http://").removesuffix("/metrics") for url in (target_url, *others)]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kimi", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    argv = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: _ready(server.base_url), _START_S, (folder / "prometheus.log").read_text)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False

"""Two servers of the built-in model behind one `smg launch`, as docs/runbook.md runs them, and restarts one by one."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port

from .served import ServedEngine

# launch/smg.compose.yaml, k8s/base/smg.yaml and slurm/kimi.sbatch have the same (tests/launch/test_k8s_manifests.py).
SETTINGS = {
    "policy": "cache_aware",
    "balance-abs-threshold": "16",
    "max-payload-size": "33554432",
    "health-check-endpoint": "/ready",
    "health-check-interval-secs": "1",
    "health-check-timeout-secs": "5",
    "health-failure-threshold": "1",
    "health-success-threshold": "1",
    "worker-startup-timeout-secs": "5400",
    "worker-startup-check-interval": "1",
    "history-backend": "none",
}
FLAGS = ("disable-tokenizer-autoload",)
CONTROL_KEY = "a-control-key-of-this-machine"
_READY_S = 120.0
_ROUTED_S = 60.0


@dataclass(frozen=True)
class Smg:
    """One running `smg launch`. metrics_url: its Prometheus exposition."""

    process: EngineServer
    metrics_url: str

    @property
    def base_url(self) -> str:
        return self.process.base_url

    def healthy(self) -> set[str]:
        """Addresses of the servers that get requests now."""
        headers = {"Authorization": f"Bearer {CONTROL_KEY}"}
        found = httpx.get(f"{self.base_url}/workers", headers=headers, timeout=30.0).raise_for_status().json()
        return {worker["url"] for worker in found["workers"] if worker["is_healthy"]}

    def wait_healthy(self, wanted: Callable[[set[str]], bool], timeout_s: float = _ROUTED_S) -> None:
        """Wait until the servers that get requests are as wanted; raise KimiError if they do not become so."""
        end = time.monotonic() + timeout_s
        while not wanted(found := self.healthy()):
            if time.monotonic() > end:
                raise KimiError(f"smg routes to {sorted(found)}", str(self.process.log_path))
            time.sleep(0.1)


@contextmanager
def smg(folder: Path, words: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Smg]:
    """Run `smg launch` with our settings and more words, such as the addresses of the servers."""
    port, metrics = free_port(), free_port()
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    settings += [f"--{name}" for name in FLAGS]
    settings += ["--host", "127.0.0.1", "--port", str(port), "--control-plane-api-keys", f"ops:ops:admin:{CONTROL_KEY}"]
    settings += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "info"]
    program = str(Path(sys.executable).with_name("smg"))
    command = [program, "launch", *settings, *words]
    with EngineServer(command, env or {}, "127.0.0.1", port, folder / "smg.log", "smg") as process:
        process.wait_ready(_READY_S)
        yield Smg(process, f"http://127.0.0.1:{metrics}/metrics")


@contextmanager
def behind_smg(
    folder: Path, arguments: Sequence[str] = (), engine: type[ServedEngine] = ServedEngine
) -> Iterator[tuple[Smg, list[ServedEngine]]]:
    """Run two servers behind smg, ready and routed to."""
    with ExitStack() as stack:
        servers = [engine(folder / f"server-{number}", arguments) for number in range(2)]
        for server in servers:
            stack.enter_context(server)
        urls = [server.base_url for server in servers]
        front = stack.enter_context(smg(folder, ["--worker-urls", *urls]))
        for server in servers:
            server.wait_ready()
        front.wait_healthy(lambda found: found == set(urls))
        yield front, servers


def renew_one_by_one(front: Smg, servers: Sequence[ServedEngine]) -> None:
    """Send SIGHUP to one server after the other; the next one waits until smg routes to the last again."""
    for server in servers:
        at = time.time()
        server.process.send_signal(signal.SIGHUP)
        server.wait_event(lambda event: event.event == "down", at, 300.0)
        server.wait_ready(since=at)
        front.wait_healthy(lambda found: len(found) == len(servers))

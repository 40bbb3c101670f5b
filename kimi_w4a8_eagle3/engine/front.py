"""The gateway's processes before an engine: started once, told which engine answers, drained at the end."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from ..base.errors import KimiError
from ..base.files import write_private
from ..base.http import http_url, trusted
from ..gateway.config import BROKEN, GatewayConfig
from .leftovers import Belongings
from .process import dying_with_parent, ended, require_free_port

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SERVE_S = 120.0  # for the gateway to answer once its engine does; on a busy laptop imports take ten seconds
_GRACE_S = 5.0
_BRIEF_S = 10.0  # a gateway that ends within this time would end again
_KILLS, _KILLED_S = 60, 0.05


class Front:
    """The gateway of one service.

    config: without the file that names the engine. named: that file, a new one by default. metrics: folder of the
    counters of all workers, as prometheus_client's multiprocess mode writes them.

    As a context manager it starts on entry and stops on exit. Start it from a thread that lives as long.
    """

    def __init__(self, config: GatewayConfig, log_path: Path, named: Path | None = None) -> None:
        self._belongings = Belongings()
        self._folder = self._belongings.folder
        self.named = (named or self._folder / "engine.json").absolute()
        self.config = replace(config, engine_file=str(self.named))
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self.metrics = self._folder / "metrics"

    @property
    def base_url(self) -> str:
        return http_url(self.config.host, self.config.port)

    @property
    def pid(self) -> int | None:
        """Process id of uvicorn's supervisor, or of the only worker; None before the start and after the stop."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the processes; raise KimiError when the port is taken."""
        require_free_port(self.config.host, self.config.port)
        self._began = time.monotonic()
        shutil.rmtree(self.metrics, ignore_errors=True)
        self.metrics.mkdir()
        file = self._folder / "gateway.json"
        file.with_suffix(".broken").unlink(missing_ok=True)
        self.config.write(file)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.metrics), "TMPDIR": str(self._folder)}
        with os.fdopen(os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                dying_with_parent([sys.executable, "-m", "kimi_w4a8_eagle3.gateway", str(file)]),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tell(self, phase: str, url: str = "", secret: str = "") -> None:
        """Say in which phase the engine is, and which one answers; the workers notice within a quarter second."""
        try:
            write_private(self.named, json.dumps({"phase": phase, "url": url, "secret": secret}).encode())
        except OSError as error:  # a full disk must not end an engine; after the end the folder is gone
            logger.error("the gateway cannot be told that the engine is %s: %s", phase, error)

    def wait_ready(self, on_wait: Callable[[], object] = lambda: None) -> None:
        """Wait until clients are answered; raise KimiError when the processes end, stay silent, or refuse.

        on_wait: called between two requests, which may take 5 s each.
        """
        end, found = time.monotonic() + _SERVE_S, ""
        with httpx.Client(timeout=5.0, verify=trusted(), trust_env=False) as client:
            while True:
                self.require_running()
                try:
                    answer = client.get(f"{self.base_url}/ready")
                    if answer.status_code == 200:
                        return
                    found = f"HTTP {answer.status_code}: {answer.text[:300]}"
                except httpx.HTTPError as error:
                    found = f"no answer: {error or type(error).__name__}"
                if time.monotonic() > end:
                    raise ended(f"the gateway was not ready within {_SERVE_S:.0f} s ({found})", self._log_path)
                on_wait()
                time.sleep(_POLL_S)

    def require_running(self) -> None:
        """Raise KimiError if the processes have ended."""
        if self._process is None:
            raise KimiError("the gateway was stopped")
        if (code := self._process.poll()) is not None:
            raise ended(f"the gateway ended with exit code {code}", self._log_path)

    def restart_if_ended(self) -> None:
        """Start the processes again when they ended; raise KimiError when they would end again."""
        if self._process is None or self._process.poll() is None:
            return
        if time.monotonic() - self._began < _BRIEF_S or self._process.returncode == BROKEN:
            self.require_running()
        logger.error("the gateway ended with exit code %s; it is started again", self._process.returncode)
        self.stop()  # its workers outlive it, and hold the port
        self.start()

    def stop(self, grace_s: float = _GRACE_S) -> bool:
        """Let the running answers end, then end the processes; return False if some were cut. Idempotent."""
        if (process := self._process) is None:
            return True
        whole = True
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                whole = False
        with suppress(ProcessLookupError):  # until no worker and no trial of its session is left to hold the port
            for _ in range(_KILLS):
                os.killpg(process.pid, signal.SIGKILL)
                process.poll()
                time.sleep(_KILLED_S)
        process.wait()
        self._process = None  # its number may soon be another one's
        return whole

    def __enter__(self) -> Front:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._belongings.remove()

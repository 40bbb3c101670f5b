"""An engine with the gateway before it, for programs that measure and test: no supervisor restarts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..base.http import Address
from ..gateway.config import GatewayConfig
from .front import Front
from .process import EngineServer


class FrontedEngine:
    """Both processes as one server. As a context manager it starts on entry and stops on exit.

    engine: answers SGLang's own API to whoever has its key. base_url: the gateway's, for clients.
    """

    def __init__(self, engine: EngineServer, config: GatewayConfig) -> None:
        self.engine = engine
        self.front = Front(config, engine.log_path)

    @property
    def base_url(self) -> str:
        return self.front.base_url

    @property
    def address(self) -> Address:
        """The engine's own address."""
        return self.engine.address

    @property
    def engine_file(self) -> Path:
        """The file that names the engine."""
        return self.front.named

    @property
    def pid(self) -> int:
        """Process id of the engine's main process."""
        return self.engine.pid

    @property
    def log_path(self) -> Path:
        """Output of all processes."""
        return self.engine.log_path

    def start(self) -> None:
        """Start both; raise KimiError when the port is taken."""
        self.front.start()
        self.engine.start()

    def wait_ready(self, timeout_s: float, on_wait: Callable[[], None] | None = None) -> float:
        """Wait until clients are answered; return the seconds from `start` until the engine answered.

        timeout_s, on_wait: of the engine, as in `EngineServer.wait_ready`. Raises KimiError when one of both ends or
        does not answer in time.
        """
        seconds = self.engine.wait_ready(timeout_s, on_wait)
        self.front.tell("ready", self.engine.base_url, self.engine.secret)
        self.front.wait_ready()
        return seconds

    def stop(self, grace_s: float = 20.0) -> bool:
        """Let running requests end, then end all processes; return False if some were cut. Idempotent."""
        whole = self.front.stop(grace_s)
        return self.engine.stop(grace_s) and whole

    def __enter__(self) -> FrontedEngine:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.front.__exit__()

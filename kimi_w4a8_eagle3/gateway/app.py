"""The ASGI application of one worker of the gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from uvicorn.config import STARTUP_FAILURE

from .collect import Collecting
from .config import BROKEN, VARIABLE, GatewayConfig
from .engine import Engine
from .errors import Refusal
from .exchange import Exchange
from .facts import EngineFacts, folder_of, vocabulary_of
from .keys import Keys
from .limits import Running
from .render import Renderer
from .sealed import Seal
from .service import Service
from .trials import Trials

SWITCH_S = 0.0005  # after which a thread that reads a body gives the interpreter to the event loop; Python's is 5 ms
_CORES = 8  # with fewer, the first grammar waits for a process, whose start would slow the model down

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gateway:
    """One worker's application. It answers 503 until its tokenizer is loaded and the engine serves."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._keys = Keys(Path(config.key_file) if config.key_file else None, config.key)
        self._running = Running(-(-config.max_running // config.workers))
        self._engine = Engine()
        self._facts = EngineFacts(self._engine, Path(config.engine_file), config.max_prompt_tokens)
        self._service: Service | None = None
        self._trials: Trials | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve the lifespan of the worker, or a request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            config = self._config
            await Exchange(
                self._service, self._keys, self._running, self.ready, config.max_body_bytes, scope, receive, send
            ).serve()
        else:  # a websocket
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def ready(self, probed: bool = False) -> None:
        """Raise Refusal unless a new request can be answered. probed: by a router, which sends none while it drains."""
        phase = self._facts.phase
        if self._service is None or not self._facts.serving or (probed and phase == "draining"):
            raise Refusal(f"the server does not serve now: {phase}", status=503)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._tasks = [asyncio.ensure_future(self._facts.follow()), asyncio.ensure_future(self._load())]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.close()
        if self._trials is not None:
            await asyncio.to_thread(self._trials.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _load(self) -> None:
        """Load what renders prompts; an error ends the gateway, because every worker would fail again."""
        config = self._config
        try:
            checkpoint = await asyncio.to_thread(folder_of, config.checkpoint, config.revision)
            renderer = await asyncio.to_thread(Renderer.load, checkpoint, config.trusted)
            vocabulary = vocabulary_of(checkpoint) or renderer.vocabulary
            self._trials = Trials(checkpoint, config.trusted, vocabulary, config.max_mask_ms)
            if (os.cpu_count() or 1) >= _CORES:
                self._trials.warm()
            collecting = Collecting(Path(config.collect), renderer, vocabulary) if config.collect else None
            seal = Seal(self._keys.first)
            self._service = Service(
                self._engine, self._facts, renderer, self._trials, seal, config.model, config.check_model, checkpoint,
                collecting,
            )  # fmt: skip
            gc.collect()
            gc.freeze()  # a full collection of what transformers brings would stop all clients for 60 to 90 ms
        except Exception:
            logging.getLogger(__name__).exception("the gateway cannot render prompts")
            Path(os.environ[VARIABLE]).with_suffix(".broken").touch()
            os._exit(BROKEN if config.workers == 1 else STARTUP_FAILURE)


def create() -> Gateway:
    """Return the application of a worker, which uvicorn starts without arguments."""
    sys.setswitchinterval(SWITCH_S)
    return Gateway(GatewayConfig.read(Path(os.environ[VARIABLE])))

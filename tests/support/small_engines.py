"""Real HTTP servers with the endpoints by which a router knows an SGLang engine: quick to start, any identity."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kimi_w4a8_eagle3.engine.process import free_port
from proof.load.asgi import served_app

ARCHITECTURE = "KimiK25ForConditionalGeneration"


class SmallEngine:
    """Answers chat with its own name unless it is `held`; identity may be changed while it runs."""

    def __init__(self, name: str, model: str = "kimi", weights: str = "aaaa", port: int | None = None) -> None:
        self.name, self.model, self.weights = name, model, weights
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.held = False
        self.asked = self.answered = 0

    def __enter__(self) -> SmallEngine:
        routes = [
            Route("/health", self._ok),
            *(Route(path, self._info) for path in ("/model_info", "/server_info", "/get_server_info")),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self._served = served_app(Starlette(routes=routes), self.port)
        self._served.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._served.__exit__(None, None, None)

    async def _ok(self, _: Request) -> Response:
        return Response()

    async def _info(self, _: Request) -> Response:
        names = {"served_model_name": self.model, "model_path": f"/models/{self.model}", "model_type": "kimi_k25"}
        return JSONResponse({**names, "weight_version": self.weights, "architectures": [ARCHITECTURE], "tp_size": 8})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _chat(self, _: Request) -> Response:
        self.asked += 1
        while self.held:
            await asyncio.sleep(0.02)
        self.answered += 1
        message = {"role": "assistant", "content": self.name}
        return JSONResponse({"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

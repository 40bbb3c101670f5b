"""The gateway's application in this process, over an engine that answers by a script.

The scripted engine refuses what SGLang's /generate fails on: unknown names, wrong types, ids outside of the vocabulary,
a request id that another request has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from kimi_w4a8_eagle3.gateway.conversation import Grammar
from kimi_w4a8_eagle3.gateway.engine import Engine
from kimi_w4a8_eagle3.gateway.exchange import Exchange
from kimi_w4a8_eagle3.gateway.facts import EngineFacts, Room
from kimi_w4a8_eagle3.gateway.keys import Keys
from kimi_w4a8_eagle3.gateway.limits import Running
from kimi_w4a8_eagle3.gateway.pictures import Pads, check_pictures
from kimi_w4a8_eagle3.gateway.render import Renderer
from kimi_w4a8_eagle3.gateway.sealed import Seal
from kimi_w4a8_eagle3.gateway.service import Service
from kimi_w4a8_laptop import tiny

MODEL = "kimi-k2.5-tiny"
CONTEXT = 8192
ADDRESS = "http://127.0.0.1:9527"
# Of SGLang 0.5.20's GenerateReqInput and SamplingParams (managers/io_struct.py, sampling/sampling_params.py).
_FIELDS = {
    "input_ids": list, "stream": bool, "require_reasoning": bool, "image_data": list, "return_logprob": bool,
    "logprob_start_len": int, "top_logprobs_num": int, "cache_salt": str, "sampling_params": dict, "rid": str,
}  # fmt: skip
_SAMPLING = {
    "max_new_tokens": int, "temperature": (int, float), "top_p": (int, float), "top_k": int, "min_p": (int, float),
    "frequency_penalty": (int, float), "presence_penalty": (int, float), "repetition_penalty": (int, float),
    "logit_bias": dict, "min_new_tokens": int, "stop_token_ids": list, "ignore_eos": bool, "stop": list,
    "sampling_seed": int, "spaces_between_special_tokens": bool, "json_schema": str, "regex": str,
    "structural_tag": str,
}  # fmt: skip


@cache
def renderer() -> Renderer:
    """Return the renderer of the built-in model."""
    return Renderer.load(tiny.target_path(), trusted=False)


class ScriptedEngine(Engine):
    """Answers each request with `words`, in pieces of `step` characters where it streams. seen: the bodies."""

    def __init__(self, words: str | Callable[[], str] = "I think.</think>Done.", step: int = 9) -> None:
        super().__init__()
        self.words, self.step = words, step
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.finish: dict[str, Any] = {"type": "stop", "matched": 3}
        self.wait: asyncio.Event | None = None  # before the first piece
        self.fail_after = -1  # pieces before an error of the engine
        self.silent_s = 0.0

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        check_body(body)
        assert body["rid"] not in [seen["rid"] for seen in self.seen]
        self.seen.append(body)
        ended = False
        try:
            if self.wait is not None:
                await self.wait.wait()
            text = self.words if isinstance(self.words, str) else self.words()
            step = self.step if body["stream"] else max(1, len(text))
            pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
            for at, piece in enumerate(pieces):
                if at == self.fail_after:
                    ended = True
                    raise self.broken
                last = at == len(pieces) - 1
                ended = last
                yield self._part(body, text[: at * step], piece, last)
        finally:
            if not ended:
                self.aborted.append(body["rid"])

    broken: Exception = RuntimeError("the script names an error")

    def _part(self, body: dict[str, Any], before: str, piece: str, last: bool) -> dict[str, Any]:
        ids = renderer().encode(piece, special=True) or [3]
        meta: dict[str, Any] = {
            "id": body["rid"], "finish_reason": self.finish if last else None, "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(renderer().encode(before + piece, special=True)), "cached_tokens": 0,
        }  # fmt: skip
        if body.get("return_logprob"):
            number = body["top_logprobs_num"]
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            meta["output_top_logprobs"] = [
                [[-0.5 - other, token + other, None] for other in range(number)] for token in ids
            ]
        return {"text": piece, "output_ids": ids, "meta_info": meta, "index": 0}


def check_body(body: dict[str, Any]) -> None:
    """Fail where SGLang's /generate would, or would misread the request."""
    for names, given in ((_FIELDS, body), (_SAMPLING, body["sampling_params"])):
        for name, value in given.items():
            assert name in names, f"SGLang has no field {name}"
            assert isinstance(value, names[name]) and (names[name] is bool or type(value) is not bool), (name, value)
    assert body["input_ids"] and all(0 <= token < 640 for token in body["input_ids"])
    assert len(body["rid"]) == 32  # an abort takes a prefix: ids of one length
    for grammar in ("json_schema", "structural_tag"):
        json.loads(body["sampling_params"].get(grammar, "null"))


class NoTrials:
    """Passes every grammar and picture: their trials have tests of their own."""

    async def grammar(self, grammar: Grammar) -> Grammar:
        return grammar

    async def pictures(self, urls: list[str]) -> list[tuple[int, int]]:
        return check_pictures(urls)


class App:
    """The application of a worker whose engine serves."""

    def __init__(
        self, engine: ScriptedEngine, keys: Path | None = None, context: int = CONTEXT, running: Running | None = None,
        trials: Any = None, made: Renderer | None = None, max_body: int = 32 * 2**20, sees: bool = True,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.facts = EngineFacts(engine, Path("engine.json"), 0)
        self.facts.phase, self.facts._room = "ready", Room(context, context - 1)
        self.keys, self.running, self.max_body = Keys(keys), running or Running(0), max_body
        self.service = Service(
            engine, self.facts, made or renderer(), trials or NoTrials(), Seal("seal"), MODEL, True, tiny.target_path()
        )
        if sees:  # the built-in checkpoint has the numbers, and says that it reads text alone
            self.service._pads = Pads(14, 2, 16, 8)

    def ready(self, probed: bool = False) -> None:
        _ = self.facts.room

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Exchange(self.service, self.keys, self.running, self.ready, self.max_body, scope, receive, send).serve()

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self, client=("127.0.0.1", 1), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=60)

    def ask(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Return the answer to a POST."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def one() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, content=content, headers=headers)

        return asyncio.run(one())


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


class Wire:
    """An ASGI server's side of one request, which the test plays step by step."""

    def __init__(
        self, app: App, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = (), more: bool = False
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arriving: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.arriving.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": more})
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
        self.task = asyncio.ensure_future(app(scope, self.arriving.get, self.send))

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.leave()  # so says uvicorn behind the last byte

    def leave(self) -> None:
        self.arriving.put_nowait({"type": "http.disconnect"})

    def half_close(self) -> None:
        self.arriving.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")

"""A server that answers at once, with SGLang's endpoints, for tests of the benchmark.

It pretends to speculate: verify steps accept 0, 1, 2, 3, 0, 1, ... drafts, so every acceptance figure is known.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kimi_w4a8_laptop import tiny
from proof.load.asgi import served_app

MODEL = "null-model"
DRAFT_TOKENS = 4
NUM_PROMPTS = 6
KEY = "a-key-for-the-null-server"


def steps_of(tokens: int) -> list[int]:
    """Tokens committed by each verify step of an answer; the first token comes from prefill."""
    left, steps = tokens - 1, list[int]()
    while left > 0:
        steps.append(min(1 + len(steps) % DRAFT_TOKENS, left))
        left -= steps[-1]
    return steps


@contextmanager
def null_server(
    tokenizer: Path | None = None,
    context_len: int = 16384,
    fail_every: int = 0,
    api_key: str | None = None,
    late_s: float = 0.0,
) -> Iterator[str]:
    """The address of a null server. Every `fail_every`-th request gets a 500; requests need `api_key` if it is set.

    late_s: so long after its answer the second request is counted. `bench` checks the key by the first, then warms up.
    """
    server = _NullServer(str(tokenizer or tiny.target_path()), context_len, fail_every, api_key, late_s)
    with served_app(server.app) as url:
        yield url


class _NullServer:
    def __init__(self, tokenizer: str, context_len: int, fail_every: int, api_key: str | None, late_s: float) -> None:
        self.context_len, self.fail_every, self.api_key, self.late_s = context_len, fail_every, api_key, late_s
        self.asked, self.counters = 0, Counter[str]()
        paths = {"tokenizer_path": tokenizer, "model_path": MODEL}
        speculates = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": DRAFT_TOKENS}
        known = {"/server_info": {**paths, "version": "null", **speculates}, "/health": paths, "/model_info": paths}
        self.app = Starlette(
            routes=[
                *(Route(path, lambda _, body=body: JSONResponse(body)) for path, body in known.items()),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/flush_cache", lambda _: JSONResponse({}), methods=["POST"]),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/completions", self.openai, methods=["POST"]),
                Route("/v1/chat/completions", self.openai, methods=["POST"]),
            ]
        )

    def metrics(self, _: Request) -> Response:
        """Prometheus text with the engine's names."""
        names = ("generation_tokens", "prompt_tokens", "num_requests", "spec_verify_calls", "cached_tokens")
        lines = [f"# TYPE sglang:{name}_total counter\nsglang:{name}_total {self.counters[name]}.0" for name in names]
        lines.append(f"# TYPE sglang:context_len gauge\nsglang:context_len {self.context_len}.0\n")
        return PlainTextResponse("\n".join(lines))

    def models(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"data": [{"id": MODEL}]})

    def refusal(self, request: Request) -> Response | None:
        if self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return JSONResponse({"error": {"message": "this server needs a key"}}, 401)

    def failure(self, request: Request) -> Response | None:
        """The answer to a request without the key, and to one whose turn it is to fail."""
        if refusal := self.refusal(request):
            return refusal
        self.asked += 1
        fails = self.fail_every and self.asked % self.fail_every == 0
        return JSONResponse({"message": "the null server was told to fail"}, 500) if fails else None

    def count(self, prompt: int, tokens: int, steps: int = 0, cached: int = 0) -> None:
        counts = {"num_requests": 1, "prompt_tokens": prompt, "generation_tokens": tokens}
        counts |= {"spec_verify_calls": steps, "cached_tokens": cached}
        if self.late_s and self.asked == 2:
            asyncio.get_running_loop().call_later(self.late_s, self.counters.update, counts)
        else:
            self.counters.update(counts)

    async def generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if failure := self.failure(request):
            return failure
        tokens = int(body["sampling_params"]["max_new_tokens"])
        steps = steps_of(tokens)
        prompt = len(str(body.get("text", "")).split())  # a word counts as a token
        self.count(prompt, tokens, len(steps))
        histogram = [sum(step == k + 1 for step in steps) for k in range(DRAFT_TOKENS)]
        meta = {"prompt_tokens": prompt, "finish_reason": {"type": "length"}, "spec_verify_ct": len(steps)}
        meta |= {"spec_correct_drafts_histogram": histogram}
        counts = [1 + sum(steps[:done]) for done in range(len(steps) + 1)]
        pieces = [
            {"text": "x " * n, "output_ids": [7] * n, "meta_info": meta | {"completion_tokens": n}} for n in counts
        ]
        return _streamed(pieces) if body.get("stream") else JSONResponse(pieces[-1])

    async def openai(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if failure := self.failure(request):
            return failure
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        # A prefix cache has all words of a later turn but those of its last message.
        words = [len(str(message["content"]).split()) for message in body.get("messages", ())]
        prompt, cached = (sum(words) if words else 1), (sum(words[:-1]) if len(words) > 2 else 0)
        self.count(prompt, tokens, cached=cached)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        chat = "messages" in body
        if not body.get("stream"):
            text = "x " * tokens
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return JSONResponse({"choices": [{"index": 0, "finish_reason": "length", **said}], "usage": usage})
        piece: dict[str, Any] = {"delta": {"content": "x "}} if chat else {"text": "x "}
        pieces: list[dict[str, Any]] = [{"choices": [{"index": 0, "finish_reason": None, **piece}]}] * tokens
        found = {"sglext": {"cached_tokens_details": {"device": cached}}} if cached else {}
        return _streamed([*pieces, {"choices": [], "usage": usage, **found}], signs=chat)


def _streamed(pieces: list[dict[str, Any]], signs: bool = False) -> Response:
    events = [f"data: {line}\n\n" for line in (*map(json.dumps, pieces), "[DONE]")]
    return StreamingResponse(iter([": ping\n\n"] * signs + events), media_type="text/event-stream")

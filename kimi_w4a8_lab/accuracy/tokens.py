"""Client for answers as token ids: greedy with top logprobs, sampled, prefilled, or streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import httpx

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation, generation, refused

from .reply import events

TOP = 10
_TIMEOUT_S = 1800.0
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}  # override the model's generation_config.json
_FIRST = {"temperature": 0.0, "max_new_tokens": 1}
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Tokens:
    """One generation. ids include the end token, if any. top[i]: (logprob, id) of the best candidates at position i.

    chosen[i]: logprob of the token itself. top and chosen are empty unless requested. verify_steps: 0 without
    speculation. cached: prompt tokens found in the prefix cache.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    top: tuple[tuple[tuple[float, int], ...], ...] = ()
    verify_steps: int = 0
    cached: int = 0
    chosen: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prefill:
    """Logprobs of an answer's tokens in a prefill, and of the best candidate at each position."""

    chosen: tuple[float, ...]
    best: tuple[float, ...]


class TokenClient(EngineClient):
    """Client of one server's native SGLang endpoints; raises KimiError with the server's message on any failure."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        super().__init__(base_url, api_key, _TIMEOUT_S)

    def __enter__(self) -> TokenClient:
        return self

    def timed(self, input_ids: Sequence[int], max_new_tokens: int) -> Generation:
        """Continue a prompt greedily in a stream, and note when its first and its last token came."""
        params, began = {"temperature": 0.0, "max_new_tokens": max_new_tokens}, time.monotonic()
        body = {"input_ids": input_ids, "sampling_params": params, "stream": True}
        pieces = [(time.monotonic(), piece) for piece in self._events("/generate", body)]
        (first, _), (end, last) = pieces[0], pieces[-1]
        if len(last["output_ids"]) < last["meta_info"]["completion_tokens"]:  # each piece holds what is new alone
            texts, ids = zip(*((piece["text"], piece["output_ids"]) for _, piece in pieces), strict=True)
            last = {**last, "text": "".join(texts), "output_ids": [*chain.from_iterable(ids)]}
        found = generation(last)
        per_token = (end - first) / max(len(found.token_ids) - 1, 1)
        return replace(found, ttft_ms=1000 * (first - began), tpot_ms=1000 * per_token)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the pieces of a chat answer as the server sends them; `reply.Reply` assembles them.

        body: the request; without `model`, the served model answers.
        """
        return self._events("/v1/chat/completions", {"model": self._served, **body, "stream": True})

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise refused(response)
                yield from events(response.iter_text())
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        except ValueError as error:
            raise KimiError(str(error), where=self.base_url, remedy="read the server's log") from error

    def chat_ids(self, content: str, model: str, tools: list[dict[str, Any]] | None = None) -> tuple[int, ...]:
        """Return the token ids of one user message in the server's chat template with the generation prompt."""
        body = {"model": model, "messages": [{"role": "user", "content": content}], "tools": tools}
        return tuple(self._call("POST", "/tokenize", body)["tokens"])

    def greedy(self, ids: Sequence[int], max_tokens: int, with_top: bool, stop: str | None = None) -> Tokens:
        """Return the greedy continuation of `ids`, up to the stop string."""
        return self.answer(ids, {"max_new_tokens": max_tokens, "temperature": 0.0, "stop": stop}, with_top)

    def answer(self, ids: Sequence[int], params: dict[str, Any], with_top: bool) -> Tokens:
        """Return the continuation of `ids` under SGLang's sampling parameters `params`."""
        body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": _NEUTRAL | params}
        if with_top:
            body |= {"return_logprob": True, "top_logprobs_num": TOP}
        return _tokens(self._call("POST", "/generate", body))

    def prefill(self, prompt: Sequence[int], answer: Sequence[int]) -> Prefill:
        """Return the logprobs of `answer` after `prompt` from a prefill that uses no cached prefix."""
        body = {"input_ids": [*prompt, *answer], "sampling_params": _NEUTRAL | _FIRST, "return_logprob": True}
        # Only tokens before logprob_start_len may come from the cache.
        meta = self._call("POST", "/generate", {**body, "logprob_start_len": 0, "top_logprobs_num": 1})["meta_info"]
        places = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
        rows = [(own[0], max(own[0], top[0][0])) for own, top in list(places)[len(prompt) :]]
        return Prefill(tuple(own for own, _ in rows), tuple(best for _, best in rows))

    def leave(self, ids: Sequence[int], pieces: int) -> None:
        """Request a long continuation and disconnect after `pieces` chunks."""
        params = {**_NEUTRAL, "temperature": 0.0, "max_new_tokens": 512, "ignore_eos": True}
        with self._http.stream(
            "POST", "/generate", json={"input_ids": list(ids), "sampling_params": params, "stream": True}
        ) as answer:
            for number, _ in enumerate(answer.iter_lines(), 1):
                if number >= pieces:
                    return

    def samples(self, ids: Sequence[int], params: dict[str, Any], n: int) -> list[tuple[int, ...]]:
        """Return `n` independent continuations of `ids` under `params`; some may end early."""
        body = {"input_ids": list(ids), "sampling_params": {**_NEUTRAL, **params, "n": n}}
        return [_tokens(reply).ids for reply in self._all("POST", "/generate", body)]

    def all(
        self,
        call: Callable[[_In], _Out],
        inputs: Sequence[_In],
        concurrency: int,
        show: Callable[[int, str], None] = lambda finished, note: None,
    ) -> list[_Out]:
        """Call `call` for every input, `concurrency` at a time, and return the results in input order.

        show: takes the number of finished calls. An interruption drops the inputs that have not started.
        """
        with ThreadPoolExecutor(concurrency) as pool:
            results = list[_Out]()
            try:
                for result in pool.map(call, inputs):
                    results.append(result)
                    show(len(results), "")
                return results
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _tokens(body: dict[str, Any]) -> Tokens:
    meta = body["meta_info"]
    ids = tuple(body["output_ids"])
    ended_by = meta["finish_reason"].get("matched")
    if isinstance(ended_by, int) and (not ids or ids[-1] != ended_by):
        ids = (*ids, ended_by)
    top = tuple(tuple((entry[0], entry[1]) for entry in place or ()) for place in meta.get("output_top_logprobs") or ())
    chosen = tuple(entry[0] for entry in meta.get("output_token_logprobs") or ())
    reason, steps = meta["finish_reason"]["type"], meta.get("spec_verify_ct") or 0
    return Tokens(ids, body["text"], reason, top, steps, meta.get("cached_tokens") or 0, chosen)

"""A small client of a running engine: model facts, chat, and greedy generation with its token ids.

`sglang.bench_serving` generates the load. This client serves checks that need more than a load generator reports: token
ids and acceptance per request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from threading import Timer
from typing import Any, NoReturn
from uuid import uuid4

import httpx

from ..base.errors import KimiError, UsageError
from ..base.http import bearer, trusted
from ..base.prometheus import Reading
from .given_folder import UNCOUNTED
from .metrics import read_once

_TIMEOUT_S, _SILENT_S = 300.0, 5.0


@dataclass(frozen=True)
class Generation:
    """One finished request: text, token ids, finish reason, and draft acceptance per verify step.

    accepted_histogram[k] counts the verify steps that accepted k draft tokens; empty without speculation. ttft_ms and
    tpot_ms, the time after the first token divided by the tokens after it: of a streamed one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    accepted_histogram: tuple[int, ...]
    prompt_ids: tuple[int, ...] = ()
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


@dataclass
class Refused(KimiError):
    """An answer with a status other than 200; `message` is the server's own."""

    status: int = 0
    message: str = ""


class Body(dict[str, Any]):
    """The JSON object that `url` answered, empty for other JSON; a missing key raises KimiError."""

    def __init__(self, url: str, content: object) -> None:
        super().__init__(content if isinstance(content, dict) else {})
        self.url = url

    def __missing__(self, key: str) -> NoReturn:
        why, remedy = f"the answer has no {key!r}", "check that this is the address of an engine"
        raise KimiError(why, where=self.url, expected="an answer of SGLang's API", remedy=remedy)


class EngineClient:
    """Client of one server at `base_url`; raises KimiError with the server's own message on any failure.

    timeout_s: the time limit for an answer. An engine that runs for the first time builds kernels for minutes.
    counted: False keeps the chats of this client out of the engine's metrics of requests.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout_s: float = _TIMEOUT_S, counted: bool = True
    ) -> None:
        self.base_url, self._key, self._counted = base_url, api_key, counted
        timeout, limits = httpx.Timeout(timeout_s, connect=5.0), httpx.Limits(max_connections=256)
        try:
            self._http = httpx.Client(
                base_url=base_url, timeout=timeout, limits=limits, headers=bearer(api_key), verify=trusted()
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise UsageError(f"not an address: {error}", where=base_url, expected="http://HOST:PORT") from error

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model_name(self) -> str:
        """Return the name under which the server serves its model; say so on standard error if it is slow to answer."""
        text = f"kimi-w4a8: {self.base_url} has not answered for {_SILENT_S:g} s; Ctrl-C stops"
        slow = Timer(_SILENT_S, print, (text,), {"file": sys.stderr})
        slow.start()
        try:
            models = self._call("GET", "/v1/models")
        finally:
            slow.cancel()
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            models.__missing__("data[0].id")

    def tokenizer_path(self) -> str | None:
        """Return the engine's tokenizer: a folder on its machine or a repository; None if it does not report one."""
        return self.server_info().get("tokenizer_path")

    def server_info(self) -> dict[str, Any]:
        """Return the engine's own arguments and state."""
        return self._call("GET", "/server_info")

    def metrics(self) -> Reading:
        """Return the server's metrics, read once."""
        return read_once(self.base_url, self._key)

    def generate(self, prompt: str, max_new_tokens: int, **sampling: Any) -> Generation:
        """Complete a ready-made prompt (no chat template); greedy unless `temperature` is given."""
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **sampling}
        return generation(self._call("POST", "/generate", {"text": prompt, "sampling_params": params}))

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log probability of each token of each prompt but its first."""
        asked = {"model": self._served, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
        choices = self._call("POST", "/v1/completions", asked)["choices"]
        scores = [choice["logprobs"]["token_logprobs"] for choice in choices]
        return [score[1 : len(prompt)] for score, prompt in zip(scores, prompts, strict=True)]

    def chat(self, content: str, max_tokens: int, **sampling: Any) -> Generation:
        """Answer one user message through the chat template; greedy unless `temperature` is given."""
        return self.reply([{"role": "user", "content": content}], max_tokens, **sampling)[1]

    def reply(
        self, messages: Sequence[dict[str, Any]], max_tokens: int, **more: Any
    ) -> tuple[dict[str, Any], Generation]:
        """Return the next message of a conversation, as the server sends it, and the generation; greedy like `chat`.

        more: extra request fields such as `tools`. The generation's text is the answer without thinking or calls.
        """
        body = {"model": self._served, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"return_token_ids": True, "return_spec_tokens_details": True, **more}
        if not self._counted:
            body["rid"] = UNCOUNTED + uuid4().hex
        answer = self._call("POST", "/v1/chat/completions", body)
        choice = answer["choices"][0]
        details = (answer.get("sglext") or {}).get("spec_tokens_details") or {}
        return choice["message"], Generation(
            text=choice["message"]["content"] or "",
            token_ids=tuple(choice.get("response_token_ids") or ()),
            finish_reason=choice["finish_reason"],
            accepted_histogram=tuple(details.get("spec_correct_drafts_histogram") or ()),
            prompt_ids=tuple(choice.get("prompt_token_ids") or ()),
        )

    def chat_all(self, contents: Sequence[str], max_tokens: int, concurrency: int, **more: Any) -> list[Generation]:
        """Answer many messages, `concurrency` at a time, and return the answers in order; greedy like `chat`."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda content: self.chat(content, max_tokens, **more), contents))

    @cached_property
    def _served(self) -> str:
        return self.model_name()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Body:
        return self._all(method, path, body)[0]

    def _all(self, method: str, path: str, body: dict[str, Any] | None = None) -> list[Body]:
        """Return one answer, or those to several prompts or samples, which come as a list."""
        try:
            response = self._http.request(method, path, json=body)
        except (httpx.HTTPError, UnicodeError) as error:  # UnicodeError: a name that no host has
            raise self.unreachable(error) from error
        if response.status_code != 200:
            raise refused(response)
        found: Any = None
        with suppress(ValueError):
            found = response.json()
        url, several = str(response.request.url), isinstance(found, list) and found
        return [Body(url, one) for one in several or [found]]

    def unreachable(self, error: Exception) -> KimiError:
        why = f"the server does not answer: {error or type(error).__name__}"
        remedy = "check that it runs and that this is its address; its log shows why it stopped"
        return KimiError(why, where=self.base_url, remedy=remedy)


def require_private(base_url: str) -> None:
    """Raise KimiError when the engine answers a request without its secret: SGLang only logs a plugin that fails."""
    try:
        found = httpx.get(f"{base_url}/health", timeout=30.0, verify=trusted()).status_code
    except httpx.HTTPError as error:
        raise KimiError(f"the engine does not answer: {error}", base_url, remedy="read the end of its log") from error
    if found != HTTPStatus.UNAUTHORIZED:
        raise KimiError(
            f"the engine answered {found} to a request without its secret: it runs without this package's plugin",
            where=base_url,
            expected="HTTP 401",
            remedy="install this package beside this SGLang; if SGLANG_PLUGINS is set, add this plugin to it",
        )


def generation(body: dict[str, Any]) -> Generation:
    """Return the generation in an answer of /generate."""
    meta = body["meta_info"]
    histogram = tuple(meta.get("spec_correct_drafts_histogram") or ())
    return Generation(body["text"], tuple(body["output_ids"]), meta["finish_reason"]["type"], histogram)


def refused(response: httpx.Response) -> Refused:
    """Return the error for an answer with another status than 200."""
    try:
        body = response.json()
        message = body.get("error", body).get("message", response.text)  # the gateway's form and SGLang's flat one
    except (ValueError, AttributeError):
        message = response.text
    return Refused(
        f"the server refused: HTTP {response.status_code}: {message}",
        where=str(response.request.url),
        remedy="--api-key-file FILE, or KIMI_API_KEY_FILE" if response.status_code in (401, 403) else "",
        status=response.status_code,
        message=str(message),
    )

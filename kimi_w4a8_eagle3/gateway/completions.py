"""/v1/completions: text that the model goes on with, without a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .bodies import is_tokens, require_room
from .chat import CompletionsWriter, add_usage, token_ids
from .conversation import Grammar
from .errors import CONTEXT_EXCEEDED, Refusal
from .formats import grammar_in
from .generate import End, Usage, each, logprobs_of, sampling_params
from .limits import MAX_LOGPROBS
from .render import Renderer
from .requests import CompletionRequest, check_number, sampling_of
from .writer import Answerer, sse

PATH = "/v1/completions"
USUAL_TOKENS = 16  # OpenAI's limit where a request names none
MAX_BATCH_TOKENS = 2**18  # of many prompts together: other clients wait for their prefill


def tokens_of(request: CompletionRequest) -> int:
    """Return the tokens that an answer may have; with 0 a client asks for its prompt's echo and logprobs alone."""
    return USUAL_TOKENS if request.max_tokens is None else request.max_tokens


def prompts_of(request: CompletionRequest, renderer: Renderer, context: int) -> list[list[int]]:
    """Return the token ids of each prompt; raise Refusal for too many, and for what is none."""
    given = request.prompt
    lists = [given] if isinstance(given, str) or (given and is_tokens(given)) else given
    if not isinstance(lists, list) or not lists or not all(isinstance(one, str) or is_tokens(one) for one in lists):
        raise Refusal("prompt must be text, token ids, or a list of either", param="prompt")
    if len(lists) > 512:
        raise Refusal(f"prompt has {len(lists)} entries; at most 512 are read", param="prompt")
    check_number(request.n, len(lists))
    rough = sum(len(one) // 4 if isinstance(one, str) else len(one) for one in lists)
    if len(lists) > 1 and rough > max(context, MAX_BATCH_TOKENS):
        why = f"the prompts of this request have about {rough} tokens together, and {max(context, MAX_BATCH_TOKENS)}"
        raise Refusal(f"{why} are allowed: send fewer prompts in a request", param="prompt")
    for one in lists:
        require_room(len(one) if isinstance(one, str) else 0, context)
    ids = [renderer.encode(one, special=True) if isinstance(one, str) else one for one in lists]
    for one in ids:
        if len(one) > context:
            why = f"prompt is too long: {len(one)} tokens > {context} maximum"
            raise Refusal(why, param="prompt", code=CONTEXT_EXCEEDED)
        if not one or not all(0 <= token < renderer.vocabulary for token in one):
            raise Refusal("prompt must be text or ids of the vocabulary, and not empty", param="prompt")
    return ids


def bodies_of(request: CompletionRequest, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the bodies for /generate: n for each prompt."""
    sampling = sampling_of(request, tokens_of(request), request.stop)
    params = sampling_params(sampling) | ({"stop": list(sampling.stops)} if sampling.stops else {})
    if grammar := grammar_in(request):
        params[grammar.kind] = grammar.text
    logprobs: dict[str, Any] = {}
    if request.logprobs is not None:
        start = 0 if request.echo else -1
        logprobs = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": request.logprobs}
    salt = {"cache_salt": request.cache_salt} if request.cache_salt is not None else {}
    shared = {"stream": request.stream, **logprobs, **salt}
    return [body for prompt in prompts for body in each({"input_ids": prompt, **shared}, sampling, params)]


@dataclass
class _Choice:
    prompt: list[int]
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(
        default_factory=lambda: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    )
    offset: int = 0
    end: End | None = None


class CompletionWriter(CompletionsWriter):
    """Writes text completions."""

    def __init__(
        self, server: Answerer, request: CompletionRequest, renderer: Renderer, prompts: list[list[int]]
    ) -> None:
        super().__init__(server, request, "text_completion", "cmpl")
        self._request, self._renderer = request, renderer
        self._choices = [_Choice(prompt) for prompt in prompts for _ in range(request.n)]
        self._prompts = sum(map(len, prompts))
        self._echoed: set[int] = set()

    def part(self, index: int, part: dict[str, Any]) -> bytes:
        """Return the event of what is new in an answer."""
        choice, meta, new, ids = self._choices[index], part["meta_info"], part["text"], part["output_ids"]
        if self._request.max_tokens == 0:  # the engine draws one token at least
            new, ids, meta = "", [], {**meta, "completion_tokens": 0, "output_token_logprobs": [],
                                      "output_top_logprobs": [], "finish_reason": {"type": "length"}}  # fmt: skip
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(choice, meta, first=index not in self._echoed)
        if self._request.echo and index not in self._echoed:
            new = self._renderer.decode(choice.prompt) + new
        self._echoed.add(index)
        choice.text.append(new)
        choice.ids += ids
        reason = meta["finish_reason"]
        if reason is not None:
            usage = Usage(meta["prompt_tokens"], meta["completion_tokens"], 0, meta.get("cached_tokens") or 0)
            choice.end = End(reason["type"], usage, meta=meta)
            self._first = self._choices[0].end
            add_usage(self._usage, usage)
            self._usage.prompt = self._prompts
        made = {"index": index, "text": new, "logprobs": logprobs, "finish_reason": reason and reason["type"]}
        return sse({**self._head, "object": self._kind, "choices": [made], "usage": None})

    def _logprobs(self, choice: _Choice, meta: dict[str, Any], first: bool) -> dict[str, list[Any]]:
        new: dict[str, list[Any]] = {name: [] for name in choice.logprobs}
        kinds = (["input"] if self._request.echo and first else []) + ["output"]
        for kind in kinds:
            for drawn in logprobs_of(meta, kind):
                text = self._text(drawn.token)
                new["tokens"].append(text)
                new["token_logprobs"].append(drawn.logprob)
                new["top_logprobs"].append({self._text(token): value for token, value in drawn.top} or None)
                new["text_offset"].append(choice.offset)
                choice.offset += len(text)
        for name, values in new.items():
            choice.logprobs[name] += values
        return new

    def _text(self, token: int) -> str:
        return self._server.token_bytes(token).decode(errors="replace")

    def begin(self) -> bytes:
        """Return nothing: a completion has no event before its text."""
        return b""

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all parts were written."""
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.end is not None
            logprobs = choice.logprobs if self._request.logprobs is not None else None
            made = {"index": index, "text": "".join(choice.text), "logprobs": logprobs}
            made |= {"finish_reason": choice.end.reason}
            choices.append(made | token_ids(self._request, choice.prompt, choice.ids, choice.end))
        return self._whole(self._kind, choices)


def bound_echo(request: CompletionRequest, prompts: list[list[int]]) -> None:
    """Raise Refusal for too many logprobs of the prompts' own tokens, which skip the prefix cache."""
    if not request.echo or request.logprobs is None:
        return
    asked = request.n * sum(map(len, prompts)) * max(1, request.logprobs)
    if asked > MAX_LOGPROBS:
        why = f"logprobs of the prompt are limited to {MAX_LOGPROBS}, positions times candidates"
        raise Refusal(f"{why}; this request asks for {asked}", param="logprobs")


def grammar_of(body: dict[str, Any]) -> Grammar | None:
    """Return the grammar in a body for /generate."""
    params = body["sampling_params"]
    kind = next((kind for kind in ("json_schema", "regex", "structural_tag") if kind in params), None)
    return None if kind is None else Grammar(kind, params[kind])  # type: ignore[arg-type]  # of those three

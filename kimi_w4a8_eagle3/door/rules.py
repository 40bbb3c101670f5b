"""Checks of a request body. The body is read once, in this order, and the engine gets a rewritten one:

1. its JSON, counted and bounded whatever it means (`shape.py`);
2. its fields, by the endpoint's list (`fields.toml`): closed fields are refused, unread ones and nulls removed;
3. its types, by the engine's own request model in strict mode. A body is refused where that model would convert a value
   ("5000" or 5000.0 to 5000), so that the engine reads exactly what was checked;
4. its values: those that were seen to stop or stall SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import orjson
from packaging.version import Version

from ..gateway.pictures import check_sources
from .access import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, MESSAGES, RESPONSES, TOKENIZE
from .answers import CONTEXT_EXCEEDED, Refusal
from .dialects import translate
from .fields import SAMPLING, Fields
from .schemas import check_schema, check_text, check_tools
from .settings import DoorSettings
from .shape import Text, media_sources, parse

# SGLang formats logprobs in its event loop, 4 to 11 µs for each: those of a prompt (positions times candidates) and of
# a stream in pieces, those of any other answer in one, which takes 90 ms.
MAX_LOGPROBS, MAX_WHOLE_LOGPROBS = 65536, 8192
# No tokenizer needs more characters per token on average. Longer text is refused first, because the tokenizer would
# spend seconds on it in a process that serves all clients.
_CHARACTERS_PER_TOKEN = 16
_BATCH_TOKENS = 2**18  # of many prompts together, or the context if it is longer: other clients wait for their prefill
_BYTES_PER_TOKEN = 4  # of ordinary text: an estimate of its tokens before they are counted
_MAX_LABEL = 1024
_ANY_MODEL = "default"  # what SGLang fills in; a LoRA adapter is asked for as `model:adapter`
_MAX_STOPS = 64
# Least and largest values that Moonshot's API takes for Kimi-K2.5, by its own verifier (tests/params).
_MOONSHOT: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1.0),
    "top_p": (0.95, 0.95),
    "presence_penalty": (0, 0),
    "frequency_penalty": (0, 0),
    "n": (1, 1),
}
_MAX_TOP_LOGPROBS = 128
_ANSWER_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
_USUAL_TOKENS = {COMPLETIONS: 16, GENERATE: 128}  # of answers without a limit; elsewhere `request_guard` sets one
_INT32 = 2**31
# Remove when no release before 0.5.23 is served: there other requests of the batch fail, and the engine ends.
_NO_TOKEN_IDS = Version(metadata.version("sglang")) < Version("0.5.23.dev0")

_PROMPT_FIELDS = {
    COMPLETIONS: ("prompt",),
    GENERATE: ("text", "input_ids"),
    **dict.fromkeys(TOKENIZE, ("prompt",)),
    **dict.fromkeys(DETOKENIZE, ("tokens",)),
}
_MESSAGE_FIELDS = {
    CHAT: ("messages",),
    MESSAGES: ("messages", "system"),
    COUNT_TOKENS: ("messages", "system"),
    RESPONSES: ("input",),
    **dict.fromkeys(TOKENIZE, ("messages",)),
}
_TEMPLATE_SWITCHES = frozenset({"thinking", "enable_thinking", "preserve_thinking", "reasoning_effort"})


@dataclass(frozen=True)
class RequestModel:
    """The engine's reader of one endpoint's body.

    known: its field names. read: the engine's model in strict mode, on JSON text. It raises ValueError with a message
    for the client, or any error that SGLang's validators raise on input that they did not expect.
    """

    known: frozenset[str]
    read: Callable[[bytes], object]


class Admitted(NamedTuple):
    """The body that the engine reads, and its pictures as (field, source), which a worker has still to check.

    characters: of the text of one prompt; 0 for a list of prompts. streams: the client asks for a stream.
    """

    body: bytes
    pictures: list[tuple[str, str]]
    characters: int = 0
    streams: bool = False


@dataclass(frozen=True)
class RequestRules:
    """Checks for bodies of the endpoints in `access.CHECKED`.

    models: the engine's model of each endpoint. sampling: that of /generate's sampling_params. context: in tokens.
    served: the model's name where other names are refused. counted: dropped fields are logged and counted.
    """

    settings: DoorSettings
    models: Mapping[str, RequestModel]
    sampling: RequestModel
    context: int
    served: str | None = None
    counted: bool = True
    _fields: Fields = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = frozenset().union(*(model.known for model in (*self.models.values(), self.sampling)))
        object.__setattr__(self, "_fields", Fields(known, self.settings.stop_regex, self.counted))

    def admit(self, path: str, headers: Mapping[bytes, bytes], raw: bytes, typed: bool = False) -> Admitted:
        """Return what the engine reads in place of `raw`; raise Refusal when the engine must not see it.

        typed: a worker has checked the types of this body: one call, in which the event loop does not get its turn.
        """
        if b"x-body-compressed" in headers:
            raise Refusal("compressed bodies are not supported", status=415)
        body = parse(raw)
        model = self.models[path]
        translate(body, path, self._fields.drop)
        body = self._fields.kept(body, path)
        if path == GENERATE:
            self._keep_sampling(body)
        pictures = _pictures(path, body)
        prompts, characters = self._check_size(path, body, check_sources(pictures))
        admitted = orjson.dumps(body)
        if not typed:
            _check_types(model, admitted)
        asked = body.get("model") or _ANY_MODEL
        if self.served and asked not in (self.served, _ANY_MODEL) and asked.partition(":")[0] != self.served:
            why = f"The model {asked!r} does not exist; this server serves {self.served!r}"
            raise Refusal(why, 404, "model", "model_not_found")
        if path in DETOKENIZE:
            _check_token_ids(body.get("tokens"), "tokens")
        elif path == GENERATE:
            self._check_generate(body, prompts)
        else:
            self._check_values(path, body, prompts)
        return Admitted(admitted, pictures, characters if len(prompts) < 2 else 0, body.get("stream") is True)

    @property
    def max_tokens(self) -> int:
        return self.settings.max_prompt_tokens or self.context

    def _check_size(self, path: str, body: Mapping[str, Any], in_pictures: int) -> tuple[list[Any], int]:
        """Check each prompt, all prompts, and all text but the pictures; return the prompts and the text's length."""
        in_prompts = _PROMPT_FIELDS.get(path, ())
        prompts = [prompt for name in in_prompts if name in body for prompt in self._prompts(body[name], name)]
        text = Text.of({name: value for name, value in body.items() if name not in in_prompts}).characters - in_pictures
        text += sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        most, batch = self.max_tokens * _CHARACTERS_PER_TOKEN, max(self.max_tokens, _BATCH_TOKENS)
        if any(len(one) > (most if isinstance(one, str) else self.max_tokens) for one in prompts):
            why = f"prompt is too long: the prompt is longer than {self.max_tokens} tokens"
            raise Refusal(why, param="prompt", code=CONTEXT_EXCEEDED)  # `request_guard` counts the tokens of others
        if len(prompts) > 1 and _tokens(prompts) > batch:
            why = f"the prompts of this request have about {_tokens(prompts)} tokens together, and {batch} are allowed"
            raise Refusal(f"{why}: send fewer prompts in a request", param=in_prompts[0])
        if text > (max(most, batch * _BYTES_PER_TOKEN) if len(prompts) > 1 else most):
            why = f"prompt is too long: the text and field names of this request exceed {self.max_tokens} tokens"
            raise Refusal(why, code=CONTEXT_EXCEEDED)
        return prompts, text

    def _prompts(self, value: Any, name: str) -> list[Any]:
        """Return the prompts in a field that holds one or a list of them, as text or as token ids."""
        if isinstance(value, str):
            return [value]
        kinds = set(map(type, value)) if isinstance(value, list) else set()
        if kinds == {int}:
            return [value]
        if kinds not in ({str}, {list}) or (
            kinds == {list} and not all(set(map(type, prompt)) <= {int} for prompt in value)
        ):
            raise Refusal(f"{name} must be text, token ids, or a list of either", param=name)
        _at_most(value, self.settings.max_sequences, name)
        return list(value)

    def _check_values(self, path: str, body: Mapping[str, Any], prompts: list[Any]) -> None:
        _check_template_switches(body)
        for name in ("response_format", "text", "output_config"):
            check_schema(body.get(name), name)
        if [] in (body.get("messages"), body.get("instructions") or body.get("input")):
            raise Refusal("there is no message to answer", param="messages")  # transformers would read messages[0]
        messages = body.get("messages") or []
        if path == MESSAGES and messages and messages[-1].get("role") == "assistant":
            why = "this model does not support assistant message prefill: the conversation must end with a user message"
            raise Refusal(why, param="messages")
        if body.get("continue_final_message"):
            _check_continued(messages, body.get("chat_template_kwargs") or {})
        tools = [body.get("tools"), *(message.get("tools") for message in messages)]
        check_tools(tools)
        for name in ("logprobs", "top_logprobs"):
            _check_top_logprobs(body.get(name), name)
        if body.get("echo"):
            _check_prompt_logprobs(prompts, body.get("logprobs") or 0, body.get("n", 1))
        asked = body.get("logprobs", "message.output_text.logprobs" in body.get("include", ()))
        if asked is not False:
            candidates = asked if path == COMPLETIONS else body.get("top_logprobs", 0)
            _check_answer_logprobs(path, body, candidates, max(1, len(prompts)), bool(body.get("stream")))
        for name in ("user", "cache_salt", "extra_key"):
            _check_label(body.get(name), name)
        self._check_sampling(body, max(1, len(prompts)))
        for name, (low, high) in _MOONSHOT.items() if path == CHAT and self.settings.values == "moonshot" else ():
            if not low <= body.get(name, low) <= high:
                allowed = low if low == high else f"between {low} and {high}"
                raise Refusal(f"{name} must be {allowed} (KIMI_DOOR_VALUES=moonshot)", param=name)

    def _keep_sampling(self, body: dict[str, Any]) -> None:
        """Replace the sampling parameters of a /generate body by those that reach the engine."""
        if (params := body.get("sampling_params")) is None:
            return
        sets = params if isinstance(params, list) else [params]
        _at_most(sets, self.settings.max_sequences, "sampling_params")
        if not all(isinstance(one, dict) for one in sets):
            raise Refusal("sampling_params must be an object", param="sampling_params")
        kept = [self._fields.kept(one, SAMPLING) for one in sets]
        body["sampling_params"] = kept if isinstance(params, list) else kept[0]

    def _check_generate(self, body: Mapping[str, Any], prompts: list[Any]) -> None:
        if "text" in body and "input_ids" in body:  # SGLang takes the batch form of one and the tokens of the other
            raise Refusal("give text or input_ids, not both", param="input_ids")
        params = body.get("sampling_params", {})
        if isinstance(params, list) and (len(params) != len(prompts) or not _is_batch(body)):
            raise Refusal("a list of sampling_params needs a list of as many prompts", param="sampling_params")
        sets = params if isinstance(params, list) else [params]
        for one in sets:
            _check_types(self.sampling, orjson.dumps(one))
            self._check_sampling(one, len(prompts))
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt", "extra_key"):
            if isinstance(body.get(name), list):
                raise Refusal(f"{name} must be one value for all prompts", param=name)
            _check_label(body.get(name), name)
        _check_top_logprobs(body.get("top_logprobs_num"), "top_logprobs_num")
        ids = body.get("token_ids_logprob") or []
        _check_token_ids(ids, "token_ids_logprob", nested=False)
        if ids and _NO_TOKEN_IDS:
            raise Refusal("token_ids_logprob stops this SGLang release for all requests", param="token_ids_logprob")
        start = body.get("logprob_start_len", -1)
        if not -1 <= start < _INT32:
            why = "logprob_start_len must be a position in the prompt, or -1 for its end"
            raise Refusal(why, param="logprob_start_len")
        candidates = body.get("top_logprobs_num", 0) + len(ids)
        if body.get("return_logprob") and start >= 0:
            number = max((one.get("n", 1) for one in sets), default=1)
            _check_prompt_logprobs([prompt[start:] for prompt in prompts], candidates, number)
        for one in sets if body.get("return_logprob") else ():
            # A stream of this endpoint repeats the logprobs that it has sent.
            _check_answer_logprobs(GENERATE, one, candidates, len(prompts), streamed=False)

    def _check_sampling(self, params: Mapping[str, Any], prompts: int) -> None:
        n = params.get("n", 1)
        if n < 1:
            raise Refusal(f"n must be at least 1, got {n}", param="n")
        if (asked := prompts * n) > (most := self.settings.max_sequences):
            why = f"one request may ask for {most} sequences (prompts times n), this one asks for {asked}"
            raise Refusal(why, param="n")
        for name in ("stop", "stop_sequences"):
            stops = params.get(name)
            _at_most(stops, _MAX_STOPS, name)
            for stop in [stops] if isinstance(stops, str) else stops or ():
                _check_label(stop, name)
        for name in ("json_schema", "structural_tag"):
            check_text(params.get(name), name)


def _pictures(path: str, body: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = [(name, source) for name in _MESSAGE_FIELDS.get(path, ()) for source in media_sources(body, name)]
    given = body.get("image_data")
    found += [("image_data", source) for source in (given if isinstance(given, list) else [given])]
    return [picture for picture in found if picture[1] is not None]


def _check_types(model: RequestModel, body: bytes) -> None:
    try:
        model.read(body)
    except ValueError as error:
        raise Refusal(str(error)) from None
    except Exception as error:  # SGLang's validators use a body before they check its types
        raise Refusal(f"the body is not what this endpoint reads ({type(error).__name__})") from None


def _check_continued(messages: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]) -> None:
    """Refuse a last message with parts, which SGLang silently ignores, or alone, which leaves no prompt to render.

    With thinking on, its text would be rendered as thinking.
    """
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and len(messages) == 1:
        raise Refusal("continue_final_message needs a message before the one to continue", param="messages")
    if last.get("role") == "assistant" and not isinstance(last.get("content"), str):
        raise Refusal("continue_final_message needs a last message whose content is text", param="messages")
    if last.get("role") == "assistant" and switches.get("thinking") is not False:
        raise Refusal(
            'continue_final_message needs thinking off: send "thinking": {"type": "disabled"}', param="thinking"
        )


def _check_template_switches(body: Mapping[str, Any]) -> None:
    """Refuse other names: SGLang passes these on as keyword arguments beside its own."""
    for name, value in (body.get("chat_template_kwargs") or {}).items():
        if name not in _TEMPLATE_SWITCHES or isinstance(value, dict | list):
            raise Refusal(
                f"chat_template_kwargs may hold {', '.join(sorted(_TEMPLATE_SWITCHES))}, not {name!r:.60}",
                param="chat_template_kwargs",
            )


def _check_top_logprobs(value: int | None, name: str) -> None:
    if value is not None and not 0 <= value <= _MAX_TOP_LOGPROBS:
        raise Refusal(f"{name} must be between 0 and {_MAX_TOP_LOGPROBS}", param=name)


def _check_prompt_logprobs(prompts: list[Any], candidates: int, number: int) -> None:
    """Estimate over all prompts and `number` answers; `request_guard` counts again per prompt once it has tokens."""
    if (asked := number * _tokens(prompts) * candidates) > MAX_LOGPROBS:
        why = f"logprobs of the prompt are limited to {MAX_LOGPROBS}, positions times candidates"
        raise Refusal(f"{why}; this request asks for about {asked}")


def _tokens(prompts: list[Any]) -> int:
    return sum(len(text) // _BYTES_PER_TOKEN if isinstance(text, str) else len(text) for text in prompts)


def _check_answer_logprobs(path: str, params: Mapping[str, Any], candidates: int, prompts: int, streamed: bool) -> None:
    tokens = max((params[name] for name in _ANSWER_TOKENS if name in params), default=_USUAL_TOKENS.get(path, 1))
    asked = prompts * params.get("n", 1) * tokens * (1 + candidates)
    if asked > (most := MAX_LOGPROBS if streamed else MAX_WHOLE_LOGPROBS):
        raise Refusal(
            f"an answer{'' if streamed else ' that is not streamed'} may have {most} logprobs, tokens times candidates "
            f"of all answers; this request asks for {asked}: send fewer top_logprobs, a smaller max_tokens or n"
            + ("" if streamed else ', or "stream": true'),
            param="logprobs",
        )


def _check_token_ids(tokens: Any, name: str, nested: bool = True) -> None:
    """Check token ids in a list, or in a list of lists if `nested`."""
    for token in tokens:
        if nested and isinstance(token, list):
            _check_token_ids(token, name, nested=False)
        elif not isinstance(token, int) or not 0 <= token < _INT32:
            raise Refusal(f"{name} must be ids of the vocabulary", param=name)


def _check_label(value: Any, name: str) -> None:
    if isinstance(value, str) and len(value) > _MAX_LABEL:
        raise Refusal(f"{name} is longer than {_MAX_LABEL} characters", param=name)


def _at_most(values: Any, limit: int, name: str) -> None:
    if isinstance(values, list) and len(values) > limit:
        raise Refusal(f"{name} has {len(values)} entries; at most {limit} are read", param=name)


def _is_batch(body: Mapping[str, Any]) -> bool:
    """Return True when a /generate body asks for a list of prompts, however short, and not for one."""
    prompt = body.get("text") or body.get("input_ids")
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)

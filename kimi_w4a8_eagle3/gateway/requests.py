"""Fields of each endpoint's body: those that are read, with their types and ranges, and those that are refused.

A field that is in neither list changes no answer. It is dropped and counted, because agents send fields that only
their vendor's server reads. null always means not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .conversation import Sampling
from .errors import Refusal

MAX_SEQUENCES = 512  # prompts times n
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings, and their characters
MAX_TOP_LOGPROBS = 128
_INT32 = 2**31 - 1
_MOST_ERRORS = 64  # beyond this a message would not help the client
_SMALLEST = 2.0**-126  # the smallest normal float32; the engine's tensors have 32 bits, and less becomes 0

Object = dict[str, Any]
Label = Annotated[str, Field(max_length=1024)]
Stop = str | list[str]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Body(BaseModel):
    """Fields that more than one endpoint reads."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = ""
    stream: bool = False


class Sampled(Body):
    """Fields of OpenAI's and SGLang's sampling, in the ranges in which every number stays finite in the engine."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=_SMALLEST, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2)
    stop: Stop | None = None
    cache_salt: Label | None = None


class Completing(Sampled):
    """Fields that chat and text completions share."""

    stream_options: Object | None = None
    max_tokens: int | None = Field(None, ge=1, le=_INT32)
    min_tokens: int | None = Field(None, ge=0, le=_INT32)
    n: int = 1
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool = False
    response_format: Object | None = None
    regex: str | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_spec_tokens_details: bool = False


class ChatRequest(Completing):
    """/v1/chat/completions"""

    messages: list[Any]
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32)
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: list[Any] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    reasoning: Object | None = None
    reasoning_effort: Label | None = None
    thinking: bool | Object | None = None
    enable_thinking: bool | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: Object | None = None
    continue_final_message: bool = False


class CompletionRequest(Completing):
    """/v1/completions"""

    prompt: Any
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    logprobs: TopLogprobs | None = None
    echo: bool = False
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    json_schema: str | None = None


class ResponsesRequest(Sampled):
    """/v1/responses"""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_INT32)
    max_tool_calls: int | None = Field(None, ge=1)
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Object | None = None
    text: Object | None = None
    tool_choice: str | Object | None = None
    tools: list[Any] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Any] = Field(default_factory=list)
    thinking: bool | Object | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Object | None = None
    user: str | None = None


class _Conversing(Body):
    """Fields that Anthropic's two endpoints share."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    enable_thinking: bool | None = None
    output_config: Object | None = None


class CountRequest(_Conversing):
    """/v1/messages/count_tokens"""

    stream: Literal[False] = False


class MessagesRequest(_Conversing):
    """/v1/messages"""

    max_tokens: int = Field(ge=0, le=_INT32)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=_SMALLEST, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32)


class TokenizeRequest(Body):
    """/tokenize and /v1/tokenize"""

    prompt: str | list[str] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | Object | None = None
    reasoning_effort: Label | None = None
    thinking: bool | Object | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool = False
    stream: Literal[False] = False


class DetokenizeRequest(Body):
    """/detokenize and /v1/detokenize"""

    tokens: list[Any]
    skip_special_tokens: bool = True
    stream: Literal[False] = False


def _each(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each of the names, which stand together in one text."""
    return {name: why for names, why in reasons.items() for name in names.split()}


# Fields that would change an answer if anything read them, with the reason that the client gets.
REFUSED = _each({
    "functions function_call": "OpenAI replaced it with tools",
    "conversation prompt_logprobs documents web_search_options": "no such service here",
    "background background_options": "responses are not stored",
    "mcp_servers container": "tools run in the client",
    "chat_template truncate_prompt_tokens": "the model's template makes the prompt",
    "audio image moderation": "answers are always text",
    "include_stop_str_in_output": "an answer ends before its stop string",
    "guided_json guided_regex guided_choice guided_grammar structured_outputs grammar format": "send response_format",
    "use_beam_search length_penalty bad_words allowed_token_ids logits_processors num_predict":
        "tokens are sampled one by one",
    "thread": "threads are not kept: send the whole conversation",
})  # fmt: skip
THREADS = "thread_unsupported_request"  # on which Anthropic's tool_runner goes on without threads
# SGLang's own fields, by which a request could change the engine or read another's data.
CLOSED = _each({
    """
    rid session_id session_params lora_path custom_logit_processor custom_params priority bootstrap_host bootstrap_port
    bootstrap_room bootstrap_pair_key routed_dp_rank data_parallel_rank disagg_prefill_dp_rank http_worker_ipc
    return_hidden_states return_routed_experts return_bytes input_ids input_embeds stop_regex is_normalized
    log_metrics require_reasoning logprob_start_len token_ids_logprob return_logprob
    """: "for the engine's operator",
})  # fmt: skip
# Fields of the vendors' newest SDKs without effect on an answer of this server, with the reason.
HARMLESS = _each({
    "metadata user safety_identifier user_profile_id workspace_id inference_geo access_programs": "it names the caller",
    "service_tier speed billing_policy fallback_credit_token": "there is one tier",
    "prompt_cache_key prompt_cache_retention prompt_cache_options cache_control extra_key":
        "the prefix cache finds every prefix by itself",
    "betas diagnostics fallbacks": "nothing depends on it here",
    "context_management compaction": "the whole conversation is read anyway",
    "verbosity prediction": "a hint that the model was not trained on",
    "modalities": "answers are always text",
    "store": "nothing is stored, and a response says so",
    "skip_special_tokens": "control tokens are never text",
    "no_stop_trim": "an answer ends before its stop string",
    "return_cached_tokens_details": "usage reports the cached tokens",
    "truncation": "a prompt that is too long is refused",
    "stream_options": "the endpoint always ends with its usage",
    "add_special_tokens add_generation_prompt": "the template decides it",
    "include": "this endpoint has no optional parts",
})  # fmt: skip

Model = TypeVar("Model", bound=Body)


def read(model: type[Model], body: Mapping[str, Any], path: str, dropped: list[str]) -> Model:
    """Return the typed request; add the names of unread fields to `dropped`. Raise Refusal for what is not for it.

    A refused field may also be false, 0 or "", because load generators send all fields.
    """
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in model.model_fields:
            kept[name] = value
        elif value in (False, 0, ""):
            continue
        elif name in HARMLESS:
            dropped.append(name)
        elif name in CLOSED:
            raise Refusal(f"{name} is not for clients of this server", param=name)
        elif name in REFUSED or name in _READ:
            why = REFUSED.get(name)
            details = {"error_code": THREADS} if name == "thread" else None
            because = f": {why}" if why else ""
            raise Refusal(f"{path} has no field {name!r}{because}", param=name, details=details)
        else:
            dropped.append(name)
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise Refusal(_message(error), param=_param(error)) from None


_READ = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest)
    for name in model.model_fields
) | {"max_new_tokens", "sampling_params", "text"}


def _message(error: ValidationError) -> str:
    """Return one line: pydantic tries several forms for a value, and the deepest error is the most specific."""
    if error.error_count() > _MOST_ERRORS:
        return "the body is not what this endpoint reads"
    detail = _deepest(error)
    where = [str(part) for part in detail["loc"] if isinstance(part, int) or part.islower()]
    return f"{'.'.join(where) or 'body'}: {detail['msg']}"[:300]


def _param(error: ValidationError) -> str | None:
    place = _deepest(error)["loc"]
    return str(place[0]) if place else None


def _deepest(error: ValidationError) -> Any:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    specific = [detail for detail in errors if detail["type"] != "literal_error"] or errors
    return max(specific, key=lambda detail: len(detail["loc"]))


def check_ids(request: Completing, vocabulary: int) -> None:
    """Raise Refusal for token ids that the model does not have: the engine's tensors have no such place."""
    for name, ids in (("logit_bias", request.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        for token in ids or ():
            if not (str(token).isascii() and str(token).isdecimal() and int(token) < vocabulary):
                raise Refusal(f"{name} holds {token!r:.40}, which is no token id below {vocabulary}", param=name)


def sampling_of(request: Body, max_tokens: int | None, stop: Stop | None, name: str = "stop") -> Sampling:
    """Return the sampling of a request: the fields that are named as those of `Sampling`, its limit and its stops."""
    shared = type(request).model_fields.keys() & Sampling.__dataclass_fields__.keys() - {"max_tokens"}
    fields: dict[str, Any] = {field: getattr(request, field) for field in shared}
    return Sampling(max_tokens=max_tokens, stops=stops_of(stop, name), **fields)


def stops_of(value: Stop | None, name: str) -> tuple[str, ...]:
    """Return the stop strings; raise Refusal for too many, and for long ones."""
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOPS:
        raise Refusal(f"{name} has {len(stops)} entries; at most {MAX_STOPS} are read", param=name)
    for stop in stops:
        if len(stop) > MAX_STOP:
            raise Refusal(f"{name} is longer than {MAX_STOP} characters", param=name)
    return tuple(stop for stop in stops if stop)


def check_number(n: int, prompts: int = 1) -> None:
    """Raise Refusal for too many answers."""
    if n < 1:
        raise Refusal(f"n must be at least 1, got {n}", param="n")
    if n * prompts > MAX_SEQUENCES:
        why = f"one request may ask for {MAX_SEQUENCES} sequences (prompts times n), this one asks for {n * prompts}"
        raise Refusal(why, param="n")

"""Refuse requests whose numbers would stop SGLang's scheduler, and prompts that are too long, with a 400.

SGLang checks a request in the process that tokenizes it, where an error becomes an HTTP 400, and trusts it afterwards.
In the scheduler's process an exception ends the engine. The values refused here were seen to get through SGLang's own
checks. The prompt's length is checked here because its tokens are known here, whatever the endpoint.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from ...door.alive import current
from ...door.rules import MAX_LOGPROBS, MAX_WHOLE_LOGPROBS
from ...door.settings import read_door
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.load_snapshot import LoadSnapshot
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
FEATURE = Feature(
    "the request guard", remove_when="SGLang answers 400 to every request whose numbers its scheduler cannot compute"
)

_INT32 = 2**31 - 1
_rendered = ContextVar("_rendered", default=0)  # tokens of the prompt that this request renders
_SMALLEST = 2.0**-126  # the smallest normal float32; less may become 0
# Range of each sampling parameter in which every number derived from it stays finite in the scheduler's tensors. JSON
# numbers have 64 bits and the tensors 32: there, 1e39 is infinite and 1e-300 is a zero to divide by, and sampling then
# raises for the whole batch. The ranges are OpenAI's; for parameters that OpenAI lacks, SGLang's, with a least divisor.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),  # SGLang treats less than 1e-6 as greedy
    "top_p": (_SMALLEST, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
    "logit_bias": (-100, 100),  # per token
    "top_k": (-1, _INT32),
    "max_new_tokens": (0, _INT32),
    "min_new_tokens": (0, _INT32),
    "stream_interval": (0, _INT32),
}


@FEATURE.around(VALIDATE)
def validate_one_request(
    original: Callable[..., None],
    manager: TokenizerManager,
    obj: GenerateReqInput | EmbeddingReqInput,
    input_ids: Sequence[int] | None,
) -> None:
    """Check the request before SGLang does; SGLang answers 400 to a ValueError."""
    # With EAGLE SGLang counts a step's draft tokens as part of the prompt. The rows of req_to_token, the rope cache and
    # AITER's index buffers have room for them beyond the context, so the same requests are admitted as without EAGLE.
    manager.num_reserved_tokens = 0
    vocabulary = manager.model_config.vocab_size
    if input_ids is not None:
        check_prompt(input_ids, vocabulary, _max_prompt_tokens())
        _check_room(manager, len(input_ids), obj)
        check_copies(len(input_ids), (obj.sampling_params or {}).get("n", 1), manager.context_len)
        if getattr(obj, "return_logprob", False):
            check_prompt_logprobs(len(input_ids), obj.logprob_start_len, obj.top_logprobs_num, obj.token_ids_logprob)
            bound_answer(obj, manager.context_len - len(input_ids))
    check_numbers(obj.sampling_params, vocabulary)
    _require_tokens(getattr(obj, "token_ids_logprob", None), vocabulary, "token_ids_logprob")
    original(manager, obj, input_ids)
    if client := current.get():
        client.accept()


@FEATURE.before(f"{_CHAT}._engine_prompt")
def count_rendered(serving: OpenAIServingChat, processed: Any, *args: object, **named: object) -> None:
    """Count the tokens of a rendered prompt; of a picture, only its placeholder."""
    _rendered.set(len(processed.prompt_ids) if isinstance(processed.prompt_ids, list) else 0)


@FEATURE.around(f"{_CHAT}._convert_to_internal_request")
def check_before_answer(
    original: Callable[..., Any], serving: OpenAIServingChat, *args: object, **named: object
) -> object:
    """Refuse a prompt without room before a stream of /v1/messages begins, as Anthropic does."""
    _rendered.set(0)
    converted = original(serving, *args, **named)
    tokens = len(converted[0].input_ids or ()) or _rendered.get()
    _check_room(serving.tokenizer_manager, tokens, converted[0])
    return converted


@FEATURE.around("sglang.srt.entrypoints.anthropic.serving.AnthropicServing._error_response")
def answer_anthropic_error(
    original: Callable[..., object], serving: AnthropicServing, *args: object, **named: object
) -> object:
    """Answer 400 to a ValueError, as all other endpoints do.

    SGLang 0.5.23 does so itself; 0.5.20 answers 500.
    """
    error = sys.exc_info()[1]
    if isinstance(error, ValueError):
        return original(serving, status_code=400, error_type="invalid_request_error", message=str(error))
    return original(serving, *args, **named)


@FEATURE.around("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_loads")
async def get_loads(
    original: Callable[..., Coroutine[Any, Any, list[LoadSnapshot]]],
    manager: TokenizerManager,
    include: list[str] | None = None,
    dp_rank: int | None = None,
) -> list[LoadSnapshot]:
    """Raise for a section that does not exist here, which gives 400 instead of a later 500."""
    loads = await original(manager, include=include, dp_rank=dp_rank)
    for load in loads:
        load.to_dict(set(include) if include else None)
    return loads


def check_prompt(input_ids: Sequence[int], vocabulary: int, max_tokens: int | None) -> None:
    """Raise ValueError for a prompt that is empty, has tokens outside the vocabulary, or exceeds the limit."""
    if len(input_ids) == 0:
        raise ValueError("the prompt is empty")
    if max_tokens is not None and len(input_ids) > max_tokens:
        raise ValueError(f"prompt is too long: {len(input_ids)} tokens > {max_tokens} maximum")
    if min(input_ids) < 0 or max(input_ids) >= vocabulary:
        raise ValueError(f"token ids must be between 0 and {vocabulary - 1}")


def check_room(tokens: int, answer: int | None, context: int, prompts: int) -> None:
    """Raise ValueError for a prompt of `prompts` tokens or more, or beyond the context with its answer.

    Claude Code compacts at the first message, and asks for a shorter answer at the second.
    """
    if tokens >= prompts:
        raise ValueError(f"prompt is too long: {tokens} tokens > {prompts - 1} maximum")
    if answer is not None and tokens + answer > context:
        raise ValueError(f"input length and `max_tokens` exceed context limit: {tokens} + {answer} > {context}")


def check_copies(tokens: int, number: int, context: int) -> None:
    """Raise ValueError for `number` answers to one prompt that would prefill more than a whole context."""
    if number > 1 and number * tokens > context:
        raise ValueError(
            f"n times the prompt's tokens may be {context} at most, the context; this request asks for {number} times "
            f"{tokens}: send fewer answers per request"
        )


def check_prompt_logprobs(tokens: int, start: int | None, top: int | None, token_ids: Sequence[int] | None) -> None:
    """Raise ValueError for too many logprobs of the prompt's positions from `start` on, which delay other requests."""
    if start is None or start < 0:
        return  # only logprobs of the answer, a few per token
    asked = max(0, tokens - start) * ((top or 0) + len(token_ids or ()))
    if asked > MAX_LOGPROBS:
        raise ValueError(
            f"logprobs of the prompt are limited to {MAX_LOGPROBS}, positions times candidates; "
            f"this request asks for {asked}"
        )


def bound_answer(obj: GenerateReqInput, room: int) -> None:
    """End an answer without a limit where it has as many logprobs as `door/rules.py` allows; room: in tokens."""
    params = obj.sampling_params
    if "max_new_tokens" in params:  # else SGLang's usual 128 tokens
        a_token = params.get("n", 1) * (1 + (obj.top_logprobs_num or 0))
        most = max(1, (MAX_LOGPROBS if obj.stream else MAX_WHOLE_LOGPROBS) // a_token)
        params["max_new_tokens"] = min(most, room if params["max_new_tokens"] is None else params["max_new_tokens"])


def check_numbers(params: Mapping[str, Any] | None, vocabulary: int) -> None:
    """Raise ValueError for sampling parameters that do not fit into the scheduler's tensors."""
    for name, (low, high) in _RANGES.items():
        given = (params or {}).get(name)
        for value in given.values() if isinstance(given, Mapping) else [given]:
            if value is not None and not low <= value <= high:  # NaN is in no range
                raise ValueError(f"{name} must be between {low:.10g} and {high:.10g}, got {value}")
    _require_tokens((params or {}).get("stop_token_ids"), vocabulary, "stop_token_ids")
    for pattern in _texts((params or {}).get("stop_regex")):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex is not a regular expression: {error}") from None


def _check_room(manager: TokenizerManager, tokens: int, obj: Any) -> None:
    if not manager.allow_auto_truncate:
        answer = (obj.sampling_params or {}).get("max_new_tokens") if manager.validate_total_tokens else None
        # The scheduler refuses such prompts, too, in other words. It has one process for all requests.
        prompts = min(manager.context_len, manager.max_req_input_len or manager.context_len)
        check_room(tokens, answer, manager.context_len, prompts)


@cache
def _max_prompt_tokens() -> int | None:
    return read_door(os.environ).max_prompt_tokens


def _require_tokens(ids: Any, vocabulary: int, name: str) -> None:
    if isinstance(ids, list) and any(isinstance(token, int) and not 0 <= token < vocabulary for token in ids):
        raise ValueError(f"{name} must be between 0 and {vocabulary - 1}")


def _texts(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value or ()

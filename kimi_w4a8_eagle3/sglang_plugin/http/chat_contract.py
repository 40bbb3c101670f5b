"""Conversations as Kimi's chat format has them, and answers that say what was cut.

All three chat endpoints of SGLang render a prompt by the function that is hooked here. What they answer is SGLang's
own, except where it reports a call as complete that is not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo
from sglang.srt.entrypoints.openai import protocol

from ...gateway.calls import number_calls
from ...gateway.reader import is_json
from ..hooks import Feature
from .answer_parsers import PARSER

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, UsageInfo
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

_CHAT = "sglang.srt.entrypoints.openai.serving_chat"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_ANSWERS = ("Response", "StreamResponse")  # names of SGLang's models that contain a UsageInfo
FEATURE = Feature(
    "Kimi's conversations",
    remove_when=(
        "SGLang renders Kimi's ids of calls and thinking sent back, keeps broken past calls, "
        "and reports incomplete calls as such"
    ),
)


@FEATURE.before(f"{_CHAT}.OpenAIServingChat._process_messages")
def prepare(serving: OpenAIServingChat, request: ChatCompletionRequest, *args: object, **named: object) -> None:
    """Give the calls Kimi's ids."""
    if not request.messages:  # items of /v1/responses and /v1/messages may hold none, and the template reads the first
        raise ValueError("the request holds no message to answer: add one with a role and a text")
    if PARSER in (serving.tool_call_parser, serving.reasoning_parser):
        number_calls(request.messages)


@FEATURE.around(f"{_CHAT}.OpenAIServingChat.supports_native_reasoning_history")
def keep_thinking_apart(original: Callable[..., bool], serving: OpenAIServingChat) -> bool:
    """Give the template the thinking that /v1/messages gets back. SGLang writes it into the text of the answer."""
    return PARSER in (serving.tool_call_parser, serving.reasoning_parser) or original(serving)


@FEATURE.around(f"{_CHAT}.OpenAIServingChat._handle_last_assistant_message")
def keep_last_answer(
    original: Callable[..., object], serving: object, messages: list[dict[str, Any]], request: ChatCompletionRequest
) -> object:
    """Render a last answer as the assistant's. SGLang makes it the user's, unless the model goes on with it."""
    return original(serving, messages, request) if request.continue_final_message else (messages, None)


@FEATURE.around(f"{_CHAT}.normalize_assistant_tool_call_arguments")
def keep_broken_arguments(original: Callable[..., None], message: dict[str, Any], **named: object) -> None:
    """Render arguments that are no JSON object as the model wrote them. SGLang answers 400, for ever."""
    original(message, strict=False)


@FEATURE.around(f"{_RESPONSES}._chat_tool_call_message")
def keep_broken_call(
    original: Callable[..., dict[str, Any]], message: dict[str, Any], name: object, arguments: str
) -> dict[str, Any]:
    """Do the same for /v1/responses, where SGLang replaces such arguments by `{}`."""
    given = message.get("arguments")
    return original(message, name, given if isinstance(given, str) and given else arguments)


@FEATURE.after(f"{_CHAT}.OpenAIServingChat._process_tool_calls")
def finish_whole(result: Any, *args: object, **named: object) -> None:
    """Report no complete calls when one is cut or malformed."""
    calls = result.tool_calls or ()
    whole = calls and all(is_json(call.function.arguments) for call in calls)
    if result.finish_reason["type"] == "tool_calls" and not whole:
        result.finish_reason["type"] = "stop"


@FEATURE.around(f"{_CHAT}.OpenAIServingChat._process_tool_call_stream")
async def finish_stream(
    original: Callable[..., AsyncGenerator[str, None]], serving: object, *given: Any, **named: object
) -> AsyncGenerator[str, None]:
    """Do the same in a stream. SGLang 0.5.23 does so itself."""
    async for chunk in original(serving, *given, **named):
        yield chunk
    index, _, parsers, _, _, has_calls = given[:6]
    if getattr(getattr(parsers.get(index), "detector", None), "incomplete_tool_call_indices", None):
        has_calls[index] = False


@FEATURE.after("sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_token_usage")
def count_thinking(usage: UsageInfo, *args: object, **named: object) -> None:
    """Count thinking where OpenAI's clients look for it. SGLang 0.5.23 does so itself."""
    if usage.reasoning_tokens and getattr(usage, "completion_tokens_details", None) is None:
        _declare_details()
        usage.completion_tokens_details = {"reasoning_tokens": usage.reasoning_tokens}


@cache
def _declare_details() -> None:
    details = FieldInfo(annotation=dict[str, int] | None, default=None)
    protocol.UsageInfo.model_fields["completion_tokens_details"] = details
    for name in ("UsageInfo", *(f"{kind}{end}" for kind in ("ChatCompletion", "Completion") for end in _ANSWERS)):
        getattr(protocol, name).model_rebuild(force=True)


@FEATURE.after("sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata")
def keep_texts(metadata: dict[str, Any] | None, *args: object, **named: object) -> dict[str, Any] | None:
    """Drop the list of weight versions: OpenAI's metadata are texts, and pydantic-ai refuses others (sglang#40347)."""
    return metadata and {name: value for name, value in metadata.items() if isinstance(value, str)}

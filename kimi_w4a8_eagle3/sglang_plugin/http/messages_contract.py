"""Contract of /v1/messages with its clients: calls that are no object, and the signature of thinking.

Anthropic's clients require a signature of the thinking in a whole answer, and send both back. Here the signature has a
copy of the thinking, which is read where the client sends no text: thinking that a client changed does no harm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import orjson

from ..hooks import Feature
from .sealed_thinking import sealed, unsealed

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest, AnthropicMessagesResponse
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse

_SERVING = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
FEATURE = Feature(
    "answers on /v1/messages",
    remove_when="SGLang signs thinking on /v1/messages, and answers there with calls whose arguments are no object",
)


@FEATURE.before(f"{_SERVING}._convert_to_chat_completion_request")
def read_signatures(serving: object, request: AnthropicMessagesRequest) -> None:
    """Fill thinking that comes back without its text, as Anthropic's clients send what they did not show."""
    for message in request.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if block.type == "thinking" and not block.thinking:
                block.thinking = unsealed(block.signature) or ""


@FEATURE.before(f"{_SERVING}._convert_response")
def keep_broken_calls(serving: object, response: ChatCompletionResponse) -> None:
    """Give a call whose arguments are no object as text: SGLang would make them {}, or answer 500."""
    for choice in response.choices:
        message = choice.message
        broken = [call for call in message.tool_calls or () if not _is_object(call.function.arguments)]
        if broken:
            message.tool_calls = [call for call in message.tool_calls if call not in broken]
            texts = [f"{call.function.name} {call.function.arguments}" for call in broken]
            message.content = "\n".join(filter(None, [message.content, *texts]))
            if not message.tool_calls and choice.finish_reason == "tool_calls":
                choice.finish_reason = "stop"


@FEATURE.after(f"{_SERVING}._convert_response")
def sign_whole(answer: AnthropicMessagesResponse, *args: object) -> None:
    """Sign the thinking of a whole answer."""
    for block in answer.content:
        if block.type == "thinking":
            block.signature = sealed(block.thinking)


@FEATURE.around(f"{_SERVING}._generate_anthropic_stream")
async def sign_stream(
    original: Callable[..., AsyncIterator[str]], serving: object, *args: object, **named: object
) -> AsyncIterator[str]:
    """Sign the thinking of a stream, in an event before the end of its block."""
    thinking: list[str] = []
    async for event in original(serving, *args, **named):
        if '"thinking_delta"' in event:
            delta = orjson.loads(event.partition("data: ")[2])["delta"]
            thinking += [delta["thinking"]] if delta["type"] == "thinking_delta" else []
        elif thinking and '"content_block_stop"' in event:
            index = orjson.loads(event.partition("data: ")[2])["index"]
            delta = {"type": "signature_delta", "signature": sealed("".join(thinking))}
            signed = {"type": "content_block_delta", "index": index, "delta": delta}
            yield f"event: content_block_delta\ndata: {orjson.dumps(signed).decode()}\n\n"
            thinking = []
        elif '"content_block_start"' in event:  # a block of thinking has an empty signature there
            event = event.replace('"thinking":""}', '"thinking":"","signature":""}')
        yield event


def _is_object(text: str) -> bool:
    """Return True for a JSON object that an answer can hold: without lone surrogates and infinite numbers."""
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False

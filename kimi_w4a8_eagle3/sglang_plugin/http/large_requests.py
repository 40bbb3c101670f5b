"""Convert and tokenize large requests in threads; SGLang does it in the event loop, where all other requests wait.

A thread shares the interpreter with the event loop, which gets its turn within 0.5 ms, and most tokenizers release the
interpreter. Clients take turns. Small requests stay in the event loop. SGLang 0.5.23 itself converts chat requests in a
thread, but checks the schemas of their tools in the event loop, and tokenizes there what is sent as text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from functools import partial
from hashlib import sha256
from types import coroutine
from typing import Any

import orjson
from jsonschema import Draft4Validator, Draft7Validator, SchemaError
from starlette.responses import Response

from ...door.large import in_thread, large_request
from ...door.shares import Places
from ..hooks import Feature

_ENTRY = "sglang.srt.entrypoints"
FEATURE = Feature(
    "large requests beside the event loop",
    remove_when="SGLang converts, checks and tokenizes every request outside of its event loop",
)
_MAX_SCHEMAS = 4096
_in_thread = ContextVar("_in_thread", default=False)
_valid: dict[bytes, None] = {}  # digests of schemas


@FEATURE.around(
    f"{_ENTRY}.openai.serving_chat.OpenAIServingChat.handle_request",
    f"{_ENTRY}.openai.serving_completions.OpenAIServingCompletion.handle_request",
    f"{_ENTRY}.openai.serving_tokenize.OpenAIServingTokenize.handle_request",
    f"{_ENTRY}.openai.serving_tokenize.OpenAIServingDetokenize.handle_request",
    f"{_ENTRY}.openai.serving_responses.OpenAIServingResponses._make_request",
    f"{_ENTRY}.anthropic.serving.AnthropicServing.handle_messages",
    f"{_ENTRY}.anthropic.serving.AnthropicServing.handle_count_tokens",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
)
async def begin(original: Callable[..., Coroutine[Any, Any, object]], *args: object, **named: object) -> object:
    """Run what comes before the first wait in a thread. `in_event_loop` is such a wait, before requests are queued."""
    called, places = original(*args, **named), large_request.get()
    return await (_begun_in_thread(called, places) if places and not _in_thread.get() else called)


@FEATURE.around("sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request")
async def tokenize(original: Callable[..., Coroutine[Any, Any, object]], manager: object, obj: Any) -> object:
    """Check and pack the tokens in a thread, too: 260,000 take 15 ms. Pictures are loaded from the event loop."""
    return await (original(manager, obj) if obj.contains_mm_input() else begin(original, manager, obj))


@FEATURE.around(f"{_ENTRY}.openai.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request")
async def encode_tokens(original: Callable[..., Coroutine[Any, Any, Any]], *args: object, **named: object) -> object:
    """Encode the tokens here: FastAPI looks at each of them in the event loop, which takes 1.5 s for 2.7 million."""
    answer = await original(*args, **named)
    if not _in_thread.get() or isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")


def in_event_loop(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Return the answers; a caller in a thread waits for its turn in the event loop before the first one."""
    return _after_a_wait(answers) if _in_thread.get() else answers


async def _after_a_wait(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    await asyncio.sleep(0)
    async for answer in answers:
        yield answer


@FEATURE.around("jsonschema.Draft202012Validator.check_schema")
def check_schema(original: Callable[..., None], validator: object, schema: Any, **named: object) -> None:
    """Check a schema once: jsonschema needs 0.2 ms for an object, and agents send the same tools with each request.

    Older drafts, the type `any` and patterns of JavaScript pass: the model reads them, and a strict tool is tried.
    """
    try:
        text = orjson.dumps(schema)
    except TypeError:  # not from a request
        return original(validator, schema, **named)
    if (digest := sha256(text).digest()) in _valid:
        return
    read = orjson.loads(text.replace(b'"type":"any"', b'"type":"object"'))
    try:
        original(validator, read, format_checker=None)
    except SchemaError:
        if not any(older(older.META_SCHEMA).is_valid(read) for older in (Draft7Validator, Draft4Validator)):
            raise
    _valid[digest] = None
    while len(_valid) > _MAX_SCHEMAS:
        _valid.pop(next(iter(_valid)), None)


@coroutine
def _begun_in_thread(begun: Coroutine[Any, Any, object], places: Places) -> Generator[Any, Any, object]:
    step = partial(copy_context().run, _first_step, begun, asyncio.get_running_loop())
    ended, value = yield from in_thread(places, step, patient=True).__await__()
    while not ended:
        try:
            sent = yield value
        except BaseException as error:  # of the request's task, such as its cancellation
            ended, value = _next(partial(begun.throw, error))
        else:
            ended, value = _next(partial(begun.send, sent))
    return value


def _first_step(begun: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop) -> tuple[bool, Any]:
    _in_thread.set(True)
    asyncio._set_running_loop(loop)
    try:
        return _next(partial(begun.send, None))
    finally:
        asyncio._set_running_loop(None)


def _next(step: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether the coroutine has ended, and its result or what it waits for."""
    try:
        return False, step()
    except StopIteration as end:
        return True, end.value

"""The installed SGLang's own models of request bodies, read strictly: what the door checks is what SGLang will see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError, create_model

from ..door import fields
from ..door.access import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, MESSAGES, RESPONSES, TOKENIZE
from ..door.rules import RequestModel

_MOST_ERRORS = 64  # beyond that the message is not worth making


def request_models() -> dict[str, RequestModel]:
    """The model of each endpoint whose body is checked."""
    # SGLang's import order: it is complete when it serves
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput

    return {
        CHAT: _model(protocol.ChatCompletionRequest),
        COMPLETIONS: _model(protocol.CompletionRequest),
        RESPONSES: RequestModel(frozenset(protocol.ResponsesRequest.model_fields), _echoed(protocol)),
        MESSAGES: _model(anthropic.AnthropicMessagesRequest),
        COUNT_TOKENS: _model(anthropic.AnthropicCountTokensRequest),
        GENERATE: RequestModel(frozenset(GenerateReqInput.__dataclass_fields__), _strict(GenerateReqInput)),
        **dict.fromkeys(TOKENIZE, _model(protocol.TokenizeRequest)),
        **dict.fromkeys(DETOKENIZE, _model(protocol.DetokenizeRequest)),
    }


def sampling_model() -> RequestModel:
    """/generate's sampling parameters: SGLang makes them from a plain dictionary, whose types it never looks at."""
    from sglang.srt.sampling.sampling_params import SamplingParams  # SGLang's import order: as above

    hints = get_type_hints(SamplingParams)
    open_ = {
        name: (hints[name] | None, None) for name in sorted(fields.sampling(stop_regex=True).open) if name in hints
    }
    read = _strict(create_model("sampling_params", **open_))  # type: ignore[call-overload]  # names known at run time only
    return RequestModel(frozenset(SamplingParams.__struct_fields__), read)


def _model(model: Any) -> RequestModel:
    return RequestModel(frozenset(model.model_fields), _strict(model))


def _strict(model: Any) -> Callable[[bytes], object]:
    adapter = TypeAdapter(model)

    def read(body: bytes) -> object:
        try:
            return adapter.validate_json(body, strict=True)
        except ValidationError as error:
            raise ValueError(_message(error)) from None

    return read


def _echoed(protocol: Any) -> Callable[[bytes], object]:
    """/v1/responses: an answer repeats what was asked, and a stream of SGLang 0.5.20 does so in OpenAI's own model.

    That takes less than SGLang's request, and where it raises the stream has begun and breaks off.
    """
    from openai.types.responses import Response  # start-up: heavy, and only an engine needs it

    read = _strict(protocol.ResponsesRequest)
    first = {"model_name": "", "created_time": 0, "output": [], "status": "in_progress", "usage": None}

    def read_and_repeat(body: bytes) -> object:
        request = read(body)
        answer = protocol.ResponsesResponse.from_request(request, {}, **first).model_dump()
        try:
            Response.model_validate({**answer, "tools": []})  # as SGLang does
        except ValidationError as error:
            raise ValueError(_message(error)) from None
        return request

    return read_and_repeat


def _message(error: ValidationError) -> str:
    """One line: of all forms that SGLang tried for a value, the complaint of the one that went deepest."""
    if error.error_count() > _MOST_ERRORS:
        return "the body is not what this endpoint reads"
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    telling = [each for each in errors if each["type"] != "literal_error"] or errors  # not: "this is no other form"
    deepest = max(telling, key=lambda each: len(each["loc"]))
    where = [str(each) for each in deepest["loc"] if isinstance(each, int) or each.islower()]
    return f"{'.'.join(where) or 'body'}: {deepest['msg']}"[:300]

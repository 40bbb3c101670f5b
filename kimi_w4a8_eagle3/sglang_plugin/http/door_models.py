"""Strict readers made from the installed SGLang's own models of request bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError, create_model

from ...door.access import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, MESSAGES, RESPONSES, TOKENIZE
from ...door.fields import OPEN, SAMPLING, STOP_REGEX
from ...door.rules import RequestModel

_MOST_ERRORS = 64  # beyond this a message would not help the client


def request_models() -> dict[str, RequestModel]:
    """Return the model of each endpoint whose body is checked."""
    # SGLang's import order: complete once it serves
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
    """Return the model of /generate's sampling parameters, whose types SGLang itself does not check."""
    from sglang.srt.sampling.sampling_params import SamplingParams  # SGLang's import order: as above

    hints = get_type_hints(SamplingParams)
    open_ = {name: (hints[name] | None, None) for name in sorted(OPEN[SAMPLING] | {STOP_REGEX}) if name in hints}
    read = _strict(create_model("sampling_params", **open_))  # type: ignore[call-overload]  # names known at run time only
    return RequestModel(frozenset(SamplingParams.__struct_fields__), read)


def _model(model: Any) -> RequestModel:
    return RequestModel(frozenset(model.model_fields), _strict(model))


def _strict(model: Any, then: Callable[[Any], object] = lambda request: None) -> Callable[[bytes], object]:
    """Return a strict reader of a model, which hands what it has read to `then`."""
    adapter = TypeAdapter(model)

    def read(body: bytes) -> object:
        try:
            request = adapter.validate_json(body, strict=True)
            then(request)
        except ValidationError as error:
            raise ValueError(_message(error)) from None
        return request

    return read


def _echoed(protocol: Any) -> Callable[[bytes], object]:
    """Return a reader for /v1/responses that also checks whether SGLang can repeat the request in its answer.

    SGLang 0.5.20 repeats it in a stream with OpenAI's own model, which accepts less than SGLang's request model. An
    error there would break off a stream that has begun.
    """
    from openai.types.responses import Response  # start-up: heavy, and only an engine needs it

    first = {"model_name": "", "created_time": 0, "output": [], "status": "in_progress", "usage": None}

    def repeat(request: Any) -> None:
        answer = protocol.ResponsesResponse.from_request(request, {}, **first).model_dump()
        Response.model_validate({**answer, "tools": []})  # SGLang empties the tools, too

    return _strict(protocol.ResponsesRequest, repeat)


def _message(error: ValidationError) -> str:
    """Return one line: pydantic tries several forms for a value, and the deepest error is the most specific."""
    if error.error_count() > _MOST_ERRORS:
        return "the body is not what this endpoint reads"
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    specific = [detail for detail in errors if detail["type"] != "literal_error"] or errors  # not "no other form fits"
    deepest = max(specific, key=lambda detail: len(detail["loc"]))
    where = [str(part) for part in deepest["loc"] if isinstance(part, int) or part.islower()]
    return f"{'.'.join(where) or 'body'}: {deepest['msg']}"[:300]

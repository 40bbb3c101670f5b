"""Answer 404 to a request for a model that this server does not serve, where SGLang answers any name.

Otherwise a typo in a client's `model`, or a router that sends requests to the wrong deployment, goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .hooks import Feature

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.entrypoints.openai.protocol import OpenAIServingRequest
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

_SERVING = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"
FEATURE = Feature(
    "404 for other models",
    remove_when="SGLang refuses names of models that it does not serve",
    needs=(f"{_SERVING}._parse_model_parameter",),
)
_ANY = "default"  # what SGLang fills in when a request names no model


@FEATURE.around(f"{_SERVING}.handle_request")
async def handle_request(
    original: Callable[..., Awaitable[object]],
    serving: OpenAIServingBase,
    request: OpenAIServingRequest,
    raw_request: Request,
) -> object:
    """Answer 404 to other names. A LoRA adapter behind the served name (`model:adapter`) is kept."""
    served = serving.tokenizer_manager.served_model_name
    asked = getattr(request, "model", None) or _ANY
    if asked not in (served, _ANY) and serving._parse_model_parameter(asked)[0] != served:
        return serving.create_error_response(
            f"The model {asked!r} does not exist; this server serves {served!r}",
            err_type="NotFoundError",
            status_code=404,
            param="model",
        )
    return await original(serving, request, raw_request)

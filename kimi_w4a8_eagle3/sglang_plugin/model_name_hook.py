"""Answer 404 to a request for a model that this server does not serve, where SGLang answers any name.

Otherwise a typo in a client's `model`, or a router that sends requests to the wrong deployment, goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

TARGET = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"
_ANY = "default"  # what SGLang fills in when a request names no model


async def handle_request(original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any) -> Any:
    """AROUND hook of `OpenAIServingBase.handle_request`; a LoRA adapter behind the name (`model:adapter`) is kept."""
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

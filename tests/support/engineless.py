"""SGLang's HTTP server with the door and without an engine, for programs of `sglang_program`.

Everything in front of the engine is SGLang's own: routes, converters, chat template, tokenizer, checks of a request.
The answers are scripted.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_eagle3.sglang_plugin.http import door

prompts: dict[str, list[int]] = {}  # token ids by the request's header x-number
ADDRESS = "http://127.0.0.1:9527"


def client(
    context: int, words: Callable[[], str] = lambda: "I think.</think>Done.", checked: bool = False
) -> httpx.AsyncClient:
    """Return a client of a server with this context, whose engine answers `words()`; call it once in a process.

    checked: the lengths of requests, which SGLang checks where the engine begins.
    """
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    from sglang.srt.entrypoints import http_server  # only in a program of its own
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    argv = render(load_recipe("tiny"), [f"context-length={context}"]).argv
    args = prepare_server_args(argv[argv.index("sglang.launch_server") + 1 :])
    args.resolve_once()
    args.check_server_args()
    publish(args, role="tokenizer")
    manager, templates = init_tokenizer_manager(args, PortArgs.init_new(args))
    manager.model_config.is_multimodal = True  # SGLang refuses pictures before it renders the prompt

    async def engine(request: Any, http: Any = None) -> AsyncIterator[dict[str, Any]]:
        request.normalize_batch_and_arguments()
        given = request.input_ids or manager.tokenizer.encode(request.text)
        if checked:
            manager._validate_one_request(request, given)
        if http is not None:
            prompts[http.headers.get("x-number", "")] = given
        text = words()
        meta = {"id": request.rid, "finish_reason": {"type": "stop", "matched": None}, "prompt_tokens": len(given)}
        meta |= {"completion_tokens": 1, "reasoning_tokens": 1, "cached_tokens": 0, "weight_version": "default"}
        yield {"text": text, "output_ids": manager.tokenizer.encode(text), "meta_info": meta, "index": 0}

    manager.generate_request = engine
    http_server.set_global_state(http_server._GlobalState(manager, templates, {}))
    state = http_server.app.state
    state.openai_serving_chat = manager.serving_chat_class(manager, templates)
    state.openai_serving_completion = http_server.OpenAIServingCompletion(manager, templates)
    state.anthropic_serving = http_server.AnthropicServing(state.openai_serving_chat)
    state.openai_serving_responses = OpenAIServingResponses(manager, templates)
    door.guard_http_server(lambda *_: None, args, manager)
    transport = httpx.ASGITransport(http_server.app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=200)


def text_of(ids: list[int]) -> str:
    """Return the text of a prompt."""
    from sglang.srt.entrypoints import http_server

    text: str = http_server.get_global_state().tokenizer_manager.tokenizer.decode(ids)
    return text

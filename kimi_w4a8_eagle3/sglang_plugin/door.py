"""Put the door (`kimi_w4a8_eagle3/door/`) in front of SGLang's HTTP application, or serve nothing."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable
from typing import Any

from ..base.errors import KimiError, or_end
from ..door.middleware import Door, InternalKey, describe
from ..door.rules import RequestRules
from ..door.settings import read_door
from . import request_guard
from .door_models import request_models, sampling_model

logger = logging.getLogger(__name__)

_SERVER = "sglang.srt.entrypoints.http_server"
TARGET = f"{_SERVER}._setup_and_run_http_server"
WARM_UP = f"{_SERVER}._wait_and_warmup"
# SGLang compiles grammars in threads. It polls them this often, every 5 ms or once per decode step, before it gives up.
_GRAMMAR_POLLS = "2000"
_internal = InternalKey()


def install(registry: Any) -> None:
    """Register the door, the request guard and the warm-up's key; raise KimiError when SGLang lacks a target."""
    if read_door(os.environ).policy == "off":
        logger.warning("door: off (KIMI_DOOR=off): every client that reaches this server may do anything with it")
        return
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        raise _beyond_reach("SGLANG_RUST_SERVER serves HTTP from a program that the door cannot reach")
    from sglang.srt.plugins.hook_registry import HookType  # SGLang's import order: its registry loads us

    hooks = {
        TARGET: guard_http_server,
        WARM_UP: wait_and_warm_up,
        request_guard.TARGET: request_guard.validate_one_request,
        request_guard.MESSAGES: request_guard.process_messages,
        request_guard.ANTHROPIC_ERROR: request_guard.answer_anthropic_error,
        request_guard.LOADS: request_guard.get_loads,
    }
    for target, hook in hooks.items():
        if not callable(pkgutil.resolve_name(target)):  # the registry would only log it
            raise KimiError("this SGLang has no such function", where=target)
        registry.register(target, hook, HookType.AROUND)
    os.environ.setdefault("SGLANG_GRAMMAR_MAX_POLL_ITERATIONS", _GRAMMAR_POLLS)
    # Uvicorn trusts X-Forwarded-For from every peer in this list.
    os.environ["FORWARDED_ALLOW_IPS"] = ""


def guard_http_server(
    original: Callable[..., Any], server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `TARGET`: install the door as middleware just before the application is served."""
    with or_end("the door cannot be installed"):
        _stand_in_front(server_args, tokenizer_manager)
    return original(server_args, tokenizer_manager, *args, **kwargs)


def _stand_in_front(server_args: Any, tokenizer_manager: Any) -> None:
    from sglang.srt.entrypoints import http_server  # SGLang's import order: complete once it serves

    if (workers := getattr(server_args, "tokenizer_worker_num", 1)) != 1:
        # Each of several workers imports the application itself, in a process where this hook never runs.
        raise _beyond_reach(f"--tokenizer-worker-num {workers} serves HTTP from processes that the door cannot reach")
    if getattr(server_args, "grpc_port", None) is not None:
        raise _beyond_reach("--grpc-port opens a second port that the door does not guard")
    if getattr(server_args, "api_key", None) or getattr(server_args, "admin_api_key", None):
        raise KimiError(
            "SGLang was given a key of its own, which it writes into its log",
            where="--api-key, --admin-api-key",
            remedy="give the key to the door instead: KIMI_API_KEY_FILE, KIMI_ADMIN_KEY_FILE",
        )
    for target, hooked in (
        (WARM_UP, http_server._wait_and_warmup),
        (request_guard.TARGET, type(tokenizer_manager)._validate_one_request),
    ):
        if not hasattr(hooked, "__wrapped__"):
            raise KimiError("another plugin replaced a function that the door hooks", where=target)
    settings = read_door(os.environ)
    rules = RequestRules(settings, request_models(), sampling_model(), tokenizer_manager.context_len)
    app, host = http_server.app, server_args.host
    app.add_middleware(Door, settings=settings, host=host, rules=rules, routes=app, internal=_internal)
    logger.info("door: %s", describe(settings, host))


def wait_and_warm_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of `WARM_UP`: let SGLang's own HTTP request through the door before the server is ready."""
    from sglang.srt.runtime_context import get_serving  # SGLang's import order: complete once it serves

    try:
        # The warm-up sends SGLang's own key. SGLang's middleware was set up without one and does not check it.
        with get_serving().override(api_key=_internal.value):
            return original(*args, **kwargs)
    finally:
        _internal.expire()


def _beyond_reach(why: str) -> KimiError:
    return KimiError(
        why, where="environment or arguments", remedy="leave it out, or serve without the door: KIMI_DOOR=off"
    )

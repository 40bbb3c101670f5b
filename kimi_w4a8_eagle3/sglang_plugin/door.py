"""Puts the door (`kimi_w4a8_eagle3/door/`) in front of SGLang's HTTP application; without it nothing is served."""

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
# SGLang compiles grammars in threads and asks so often, 5 ms apart or a decoding step, before it gives one up.
_GRAMMAR_POLLS = "2000"
_internal = InternalKey()


def install(registry: Any) -> None:
    """Register the door, the request guard and the key of the warm-up; raises when one of them cannot be had."""
    if read_door(os.environ).policy == "off":
        logger.warning("door: off, as KIMI_DOOR says: whoever reaches this server may do anything with it")
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
        if not callable(pkgutil.resolve_name(target)):  # the registry would log it, and go on
            raise KimiError("this SGLang has no such function", where=target)
        registry.register(target, hook, HookType.AROUND)
    os.environ.setdefault("SGLANG_GRAMMAR_MAX_POLL_ITERATIONS", _GRAMMAR_POLLS)
    # Uvicorn believes X-Forwarded-For of any peer in this list, and takes this list from the environment.
    os.environ["FORWARDED_ALLOW_IPS"] = ""


def guard_http_server(
    original: Callable[..., Any], server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `TARGET`: puts the door in front of the application just before it is served."""
    with or_end("the door cannot be had"):
        _stand_in_front(server_args, tokenizer_manager)
    return original(server_args, tokenizer_manager, *args, **kwargs)


def _stand_in_front(server_args: Any, tokenizer_manager: Any) -> None:
    from sglang.srt.entrypoints import http_server  # SGLang's import order: it is complete when it serves

    if (workers := getattr(server_args, "tokenizer_worker_num", 1)) != 1:
        # Each of several workers imports the application anew, in a process where this hook never runs.
        raise _beyond_reach(f"--tokenizer-worker-num {workers} serves HTTP from processes that the door cannot reach")
    if getattr(server_args, "grpc_port", None) is not None:
        raise _beyond_reach("--grpc-port opens a second door that this one does not guard")
    if getattr(server_args, "api_key", None) or getattr(server_args, "admin_api_key", None):
        raise KimiError(
            "SGLang was given a key of its own, which it writes into its log",
            where="--api-key, --admin-api-key",
            remedy="give it to the door: KIMI_API_KEY_FILE, KIMI_ADMIN_KEY_FILE",
        )
    for target, hooked in (
        (WARM_UP, http_server._wait_and_warmup),
        (request_guard.TARGET, type(tokenizer_manager)._validate_one_request),
    ):
        if not hasattr(hooked, "__wrapped__"):
            raise KimiError("another plugin replaced what the door has to see", where=target)
    settings = read_door(os.environ)
    rules = RequestRules(settings, request_models(), sampling_model(), tokenizer_manager.context_len)
    app, host = http_server.app, server_args.host
    app.add_middleware(Door, settings=settings, host=host, rules=rules, routes=app, internal=_internal)
    logger.info("door: %s", describe(settings, host))


def wait_and_warm_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of `WARM_UP`: SGLang asks itself over HTTP, before anybody else is told that it is ready."""
    from sglang.srt.runtime_context import get_serving  # SGLang's import order: it is complete when it serves

    try:
        # What SGLang takes for its own key, and sends with its warm-up; its middleware was set up without.
        with get_serving().override(api_key=_internal.value):
            return original(*args, **kwargs)
    finally:
        _internal.expire()


def _beyond_reach(why: str) -> KimiError:
    return KimiError(
        why, where="environment or arguments", remedy="leave it out, or serve without a door: KIMI_DOOR=off"
    )

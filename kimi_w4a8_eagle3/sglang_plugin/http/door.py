"""Put the door (`kimi_w4a8_eagle3/door/`) in front of SGLang's HTTP application, or serve nothing."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from ...base.errors import KimiError, or_end
from ...door.alive import current
from ...door.middleware import Door, InternalKey, describe
from ...door.rules import RequestRules
from ...door.settings import read_door
from ...door.shares import BODIES, Shares
from ...door.trial import Compile, grammars_of, tried, workers
from ...engine.given_folder import UNREADY, given_folder, supervisor_key
from ...gates import read_gates
from ..hooks import Feature
from ..upkeep.pulse_hook import EventLoopWatch
from . import request_guard
from .door_models import request_models, sampling_model
from .large_requests import in_event_loop

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_SERVER = "sglang.srt.entrypoints.http_server"
_WARM_UP = f"{_SERVER}._wait_and_warmup"
_GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
_COMPILER = "sglang.srt.constrained.base_grammar_backend"
FEATURE = Feature(
    "the door",
    needs=(f"{_COMPILER}.create_grammar_backend", f"{_COMPILER}.BaseGrammarBackend._init_value_dispatch"),
    remove_when="never: SGLang has one key for clients and administrators, and no rules for requests",
    # SGLang compiles grammars in threads. It polls them this often, every 5 ms or once per step, before it gives up.
    environ={"SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": "2000"},
)
_internal = InternalKey()
# The public part of /server_info, which smg reads without a key when it registers a worker.
_PUBLIC_INFO = (
    "model_path", "served_model_name", "tokenizer_path", "tp_size", "dp_size", "speculative_algorithm",
    "speculative_num_draft_tokens",
)  # fmt: skip


def features() -> tuple[Feature, ...]:
    """Return the hooks of the door and the request guard; none when the operator switched the door off."""
    if read_door(os.environ).policy == "off":
        logger.warning("door: off (KIMI_DOOR=off): every client that reaches this server may do anything with it")
        return ()
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes"):
        raise _beyond_reach("SGLANG_RUST_SERVER serves HTTP from a program that the door cannot reach")
    # Uvicorn trusts X-Forwarded-For from every peer in this list.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    return FEATURE, request_guard.FEATURE


@FEATURE.around(f"{_SERVER}._setup_and_run_http_server")
def guard_http_server(
    original: Callable[..., object],
    server_args: ServerArgs,
    tokenizer_manager: TokenizerManager,
    *args: object,
    **kwargs: object,
) -> object:
    """Install the door as middleware just before the application is served."""
    with or_end("the door cannot be installed"):
        _stand_in_front(server_args, tokenizer_manager)
    return original(server_args, tokenizer_manager, *args, **kwargs)


def _stand_in_front(server_args: ServerArgs, tokenizer_manager: TokenizerManager) -> None:
    import sglang  # SGLang's import order: complete once it serves
    from sglang.srt.entrypoints import http_server

    if (number := getattr(server_args, "tokenizer_worker_num", 1)) != 1:
        # Each of several workers imports the application itself, in a process where this hook never runs.
        raise _beyond_reach(f"--tokenizer-worker-num {number} serves HTTP from processes that the door cannot reach")
    if getattr(server_args, "grpc_port", None) is not None:
        raise _beyond_reach("--grpc-port opens a second port that the door does not guard")
    if getattr(server_args, "enable_http2", False):
        raise _beyond_reach("--enable-http2 serves by Granian, whose connections the door does not bound")
    if getattr(server_args, "api_key", None) or getattr(server_args, "admin_api_key", None):
        raise KimiError(
            "SGLang was given a key of its own, which it writes into its log",
            where="--api-key, --admin-api-key",
            remedy="give the key to the door instead: KIMI_API_KEY_FILE, KIMI_ADMIN_KEY_FILE",
        )
    for target in (_WARM_UP, _GENERATE, request_guard.VALIDATE):
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise KimiError("another plugin replaced a function that the door hooks", where=target)
    settings = read_door(os.environ)
    served = tokenizer_manager.served_model_name if read_gates(os.environ).check_model_name else None
    rules = RequestRules(settings, request_models(), sampling_model(), tokenizer_manager.context_len, served)
    app, host = http_server.app, server_args.host
    encode = getattr(tokenizer_manager.tokenizer, "encode", None)  # no tokenizer with --skip-tokenizer-init
    shares = Shares(BODIES * settings.max_body_bytes)
    admission = workers(lambda: _compiler(server_args, tokenizer_manager), settings.max_mask_ms, rules, encode, shares)
    tokenizer_manager.kimi_admission = admission
    _bound_connections()
    app.add_middleware(EventLoopWatch)
    arguments = server_args.resolved_dict()
    info = {**{name: arguments[name] for name in _PUBLIC_INFO}, "version": sglang.__version__}
    checks = {"settings": settings, "rules": rules, "admission": admission, "shares": shares}
    folder = given_folder()
    outside = {"supervisor": supervisor_key(folder), "unready": folder and folder / UNREADY}
    app.add_middleware(Door, host=host, routes=app, public_info=info, internal=_internal, **outside, **checks)
    logger.info("door: %s", describe(settings, host))


def _bound_connections() -> None:
    try:
        from uvicorn.protocols.http import auto  # start-up: only the HTTP server needs uvicorn

        from ...base.connections import BoundedProtocol
    except ModuleNotFoundError as error:
        raise KimiError(
            f"{error.name} is not installed, and without it a client stops this server with a body of small chunks",
            expected="httptools, which this package requires",
            remedy="pip install httptools",
        ) from error
    auto.AutoHTTPProtocol = BoundedProtocol


@FEATURE.around(_WARM_UP)
def wait_and_warm_up(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Let SGLang's own HTTP request through the door before the server is ready."""
    from sglang.srt.runtime_context import get_serving  # SGLang's import order: complete once it serves

    try:
        # The warm-up sends SGLang's own key. SGLang's middleware was set up without one and does not check it.
        with get_serving().override(api_key=_internal.value):
            return original(*args, **kwargs)
    finally:
        _internal.expire()


@FEATURE.around(_GENERATE)
def generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: TokenizerManager, obj: GenerateReqInput, *args: Any
) -> AsyncIterator[Any]:
    """Try exactly what SGLang will compile, from any endpoint; a request without a grammar takes no detour.

    `sglang.Engine` has no HTTP server and so no door: its caller is the program that started it.
    The request of a client that leaves is aborted at once. SGLang looks every 4 s.
    """
    if client := current.get():
        client.at_leaving(lambda: isinstance(obj.rid, str) and manager.abort_request(obj.rid))
    answers, admission = original(manager, obj, *args), getattr(manager, "kimi_admission", None)
    grammars = grammars_of(obj.sampling_params) if admission else []
    return in_event_loop(tried(admission, grammars, answers) if admission and grammars else answers)


def _compiler(server_args: ServerArgs, manager: TokenizerManager) -> Compile:
    """Return SGLang's own compiler, with the model's vocabulary; called in the zygote."""
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend  # heavy: only the zygote needs it

    config = manager.model_config
    backend = create_grammar_backend(server_args, manager.tokenizer, config.vocab_size, config.hf_eos_token_id)
    return lambda kind, text: backend._init_value_dispatch((kind, text), False)


def _beyond_reach(why: str) -> KimiError:
    return KimiError(
        why, where="environment or arguments", remedy="leave it out, or serve without the door: KIMI_DOOR=off"
    )

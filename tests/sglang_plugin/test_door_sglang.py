"""The door on SGLang's own application, without starting an engine: which endpoints and fields it leaves open."""

from __future__ import annotations

from support.sglang_program import BOTH, VERSIONS, found, run

PROGRAM = """
import asyncio, json, os
from types import SimpleNamespace
import httpx, sglang, uvicorn
from sglang.srt.server_args import ServerArgs
from sglang.srt.entrypoints import http_server
from sglang.srt.plugins.hook_registry import HookRegistry
from kimi_w4a8_eagle3.door import access as lists, fields
from kimi_w4a8_eagle3.sglang_plugin.http import door, door_models, request_guard

resolved = ServerArgs(model_path="kimi", tokenizer_path="tokens", served_model_name="k").resolved_dict
arguments = SimpleNamespace(host="0.0.0.0", tokenizer_worker_num=1, grpc_port=None, api_key=None, admin_api_key=None,
                            tool_call_parser="kimi_k2", resolved_dict=resolved)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
manager = TokenizerManager.__new__(TokenizerManager)
manager.context_len = 8192
manager.tokenizer = None
manager.served_model_name = "kimi"
door.guard_http_server(lambda *_: None, arguments, manager)
app = http_server.app
serving = uvicorn.Config(app)  # SGLang names no protocol
serving.load()

def flat(routes):
    for route in routes:
        if hasattr(route, "original_router"):  # newer FastAPI keeps an included router whole
            yield from flat(route.original_router.routes)
        else:
            yield route

routes = [route for route in flat(app.router.routes) if not type(route).__name__.endswith("WebSocketRoute")]
paths = sorted({route.path for route in routes})
access = {path: lists.classify(path).value for path in paths}
levels = {route.path: getattr(getattr(route, "endpoint", None), "_auth_level", None) for route in routes}
models = {**door_models.request_models(), 'sampling_params': door_models.sampling_model()}

async def ask():
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        closed = {path: (await client.post(path, json={})).status_code for path in paths if access[path] == "admin"}
        nowhere = (await client.get("/nowhere")).status_code
        info = (await client.get("/server_info")).json()
        pickled = await client.post("/v1/completions", json={"prompt": "x", "custom_logit_processor": "gASV"})
        return closed, nowhere, info, [pickled.status_code, pickled.json()["error"]["param"]]

closed, nowhere, info, pickled = asyncio.run(ask())
print(json.dumps({
    "version": sglang.__version__,
    "hooked": sorted({*door.FEATURE.names, request_guard.VALIDATE} & HookRegistry._patched),
    "outermost": app.user_middleware[0].cls.__name__,
    "not_closed": sorted(path for path, status in closed.items() if status != 403),
    "number_closed": len(closed),
    "open": {path: who for path, who in access.items() if who != "admin"},
    "administrative_but_open": [path for path, level in levels.items() if level not in (None, "normal")
                                and access[path] != "admin"],
    "nowhere": nowhere,
    "reader": [protocol.__name__ for protocol in serving.http_protocol_class.__mro__[:2]],
    "info": info,
    "proxies": os.environ["FORWARDED_ALLOW_IPS"],
    "pickled": pickled,
    "refused_fields": {path: sorted(model.known - fields.OPEN[path]) for path, model in models.items()},
    "names_that_do_not_exist": {path: sorted(fields.OPEN[path] - model.known) for path, model in models.items()},
}))
"""


@BOTH
def test_the_door_stands_in_front_of_everything(newest: bool) -> None:
    facts = found(PROGRAM, newest)
    assert facts["version"] == VERSIONS[newest]
    assert facts["outermost"] == "Door"
    assert facts["hooked"] == [
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "sglang.srt.entrypoints.http_server._wait_and_warmup",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    ]
    assert facts["pickled"] == [400, "custom_logit_processor"]
    assert facts["nowhere"] == 404
    assert facts["reader"] == ["BoundedProtocol", "HttpToolsProtocol"]  # h11 lets a client stop the event loop
    assert facts["info"] == {
        "model_path": "kimi", "served_model_name": "k", "tokenizer_path": "tokens", "tp_size": 1, "dp_size": 1,
        "speculative_algorithm": None, "speculative_num_draft_tokens": None, "version": VERSIONS[newest],
    }  # fmt: skip
    assert facts["proxies"] == ""  # uvicorn reads it when it starts, and then trusts no X-Forwarded-For


@BOTH
def test_what_is_open_is_this_and_nothing_else(newest: bool) -> None:
    facts = found(PROGRAM, newest)
    expected = {
        "/": "client",
        "/generate": "native",
        "/v1/chat/completions": "client",
        "/v1/completions": "client",
        "/v1/responses": "client",
        "/v1/responses/{response_id}": "client",
        "/v1/responses/{response_id}/cancel": "client",
        "/v1/models": "client",
        "/v1/models/{model:path}": "client",
        "/tokenize": "client",
        "/v1/tokenize": "client",
        "/detokenize": "client",
        "/v1/detokenize": "client",
        "/health": "public",
        "/health_generate": "public",
        "/model_info": "public",
        "/get_model_info": "public",
        "/server_info": "public",  # of which the door lets through what names the model
        "/get_server_info": "public",
        "/v1/loads": "public",
        "/ready": "public",
        "/ping": "public",
        "/v1/messages": "client",
        "/v1/messages/count_tokens": "client",
    }
    assert facts["open"] == expected
    assert facts["number_closed"] > 50
    assert facts["not_closed"] == []
    assert facts["administrative_but_open"] == []


@BOTH
def test_fields_that_clients_may_not_set(newest: bool) -> None:
    refused = found(PROGRAM, newest)["refused_fields"]
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert {"custom_logit_processor", "lora_path", "session_params", "return_hidden_states", "rid"} <= set(
            refused[path]
        )
    assert {"bootstrap_host", "http_worker_ipc", "input_embeds", "video_data"} <= set(refused["/generate"])
    assert {"custom_params", "is_normalized", "stop_str_max_len"} <= set(refused["sampling_params"])


@BOTH
def test_every_field_that_is_allowed_exists(newest: bool) -> None:
    missing = {path: names for path, names in found(PROGRAM, newest)["names_that_do_not_exist"].items() if names}
    expected = {"/v1/chat/completions": ["reasoning"]}  # which SGLang turns into two fields that do
    if not newest:  # the next release has them
        expected["/v1/chat/completions"].append("thinking")
        expected |= {path: ["add_generation_prompt"] for path in ("/tokenize", "/v1/tokenize")}
    assert missing == expected


BROKEN = """
import contextlib, importlib, json, os, sys
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock
import sglang.srt.plugins as plugins
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry
from kimi_w4a8_eagle3.door import rules, settings
from kimi_w4a8_eagle3.sglang_plugin.http import door, door_models, request_guard

def fail(*_, **__):
    raise RuntimeError("planted")

def ends(step):
    try:
        step()
    except SystemExit as end:
        return str(end)
    return "went on"

def load():
    for name in [name for name in sys.modules if name.startswith("kimi_w4a8_eagle3.") and sys.modules[name]]:
        if ".door" in name or "request_guard" in name:
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            vars(sys.modules.get(package, SimpleNamespace())).pop(attribute, None)
    plugins._plugins_loaded = False
    plugins.load_plugins()

LOADING = {
    "a module is missing": mock.patch.dict(sys.modules, {"orjson": None}),
    "a part of ours is missing": mock.patch.dict(sys.modules, {"kimi_w4a8_eagle3.door.rules": None}),
    "a target is missing": mock.patch.object(http_server, "_wait_and_warmup", new=None),
    "the registry fails": mock.patch.object(HookRegistry, "register", fail),
    "another front end": mock.patch.dict(os.environ, {"SGLANG_RUST_SERVER": "1"}),
    "a key file that is not there": mock.patch.dict(os.environ, {"KIMI_ADMIN_KEY_FILE": "/nowhere/key"}),
}
USUAL = dict(host="127.0.0.1", tokenizer_worker_num=1, grpc_port=None, api_key=None, admin_api_key=None)
USUAL["resolved_dict"] = lambda: defaultdict(str)
manager = TokenizerManager.__new__(TokenizerManager)
manager.context_len = 8192
manager.tokenizer = None
manager.served_model_name = "kimi"
def serve(**arguments):
    door.guard_http_server(lambda *_: None, SimpleNamespace(**{**USUAL, **arguments}), manager)

SERVING = {
    "several workers": (dict(tokenizer_worker_num=2), contextlib.nullcontext()),
    "a second door": (dict(grpc_port=1), contextlib.nullcontext()),
    "another HTTP server": (dict(enable_http2=True), contextlib.nullcontext()),
    "a key of SGLang's own": (dict(admin_api_key="x"), contextlib.nullcontext()),
    "no models": ({}, mock.patch.object(door, "request_models", fail)),
    "no rules": ({}, mock.patch.object(door, "RequestRules", fail)),
    "no middleware": ({}, mock.patch.object(http_server.app, "add_middleware", fail)),
    "no request guard": ({}, mock.patch.object(TokenizerManager, "_validate_one_request", fail)),
    "no key of the warm-up": ({}, mock.patch.object(http_server, "_wait_and_warmup", fail)),
}
said = {}
for name, (arguments, broken) in SERVING.items():
    with broken:
        said[name] = ends(lambda: serve(**arguments))
said["nothing, serving"] = ends(serve)
for name, broken in LOADING.items():
    with broken:
        said[name] = ends(load)
said["nothing, loading"] = ends(load)
print(json.dumps(said))
"""


def test_nothing_is_served_if_any_part_of_the_door_is_missing() -> None:
    """SGLang would log a plugin's exception and serve without the door. This holds without a key, too."""
    said = found(BROKEN)
    healthy = {name for name in said if name.startswith("nothing, ")}
    assert {said.pop(name) for name in healthy} == {"went on"}
    assert len(said) == 15
    assert {name: line for name, line in said.items() if not line.startswith("kimi-w4a8: ")} == {}


def test_a_misspelt_setting_ends_the_process_with_its_reason() -> None:
    done = run(PROGRAM, KIMI_DOOR="closde")
    assert done.returncode == 1
    assert "kimi-w4a8: KIMI_DOOR='closde' is not allowed" in done.stderr
    assert done.stdout == ""


def test_a_door_that_is_switched_off_is_not_there() -> None:
    done = run(
        "from sglang.srt.plugins.hook_registry import HookRegistry\nprint(sorted(HookRegistry._patched))",
        KIMI_DOOR="off",
    )
    assert "http_server._wait_and_warmup" not in done.stdout and "_validate_one_request" not in done.stdout
    assert "door: off" in done.stderr

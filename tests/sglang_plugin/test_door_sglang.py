"""The door on SGLang's own application, without starting an engine: which endpoints and fields it leaves open."""

from __future__ import annotations

from support.sglang_program import BOTH, found, run

PROGRAM = """
import asyncio, json
from types import SimpleNamespace
import httpx, sglang
from sglang.srt.entrypoints import http_server
from sglang.srt.plugins.hook_registry import HookRegistry
from kimi_w4a8_eagle3.sglang_plugin import door, door_access, door_requests, request_guard

arguments = SimpleNamespace(host="0.0.0.0", tokenizer_worker_num=1, grpc_port=None)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
manager = TokenizerManager.__new__(TokenizerManager)
manager.context_len = 8192
door.guard_http_server(lambda *_: None, arguments, manager)
app = http_server.app

def flat(routes):
    for route in routes:
        if hasattr(route, "original_router"):  # newer FastAPI keeps an included router whole
            yield from flat(route.original_router.routes)
        else:
            yield route

routes = [route for route in flat(app.router.routes) if not type(route).__name__.endswith("WebSocketRoute")]
paths = sorted({route.path for route in routes})
access = {path: door_access.classify(path, lambda: True).value for path in paths}
levels = {route.path: getattr(getattr(route, "endpoint", None), "_auth_level", None) for route in routes}
known = door_requests.sglang_fields()

async def ask():
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        closed = {path: (await client.post(path, json={})).status_code for path in paths if access[path] == "admin"}
        nowhere = (await client.get("/nowhere")).status_code
        pickled = await client.post("/v1/completions", json={"prompt": "x", "custom_logit_processor": "gASV"})
        return closed, nowhere, [pickled.status_code, pickled.json()["error"]["param"]]

closed, nowhere, pickled = asyncio.run(ask())
print(json.dumps({
    "version": sglang.__version__,
    "hooked": sorted({door.TARGET, request_guard.TARGET} & HookRegistry._patched),
    "outermost": app.user_middleware[0].cls.__name__,
    "not_closed": sorted(path for path, status in closed.items() if status != 403),
    "number_closed": len(closed),
    "open": {path: who for path, who in access.items() if who != "admin"},
    "administrative_but_open": [path for path, level in levels.items() if level not in (None, "normal")
                                and access[path] != "admin"],
    "nowhere": nowhere,
    "pickled": pickled,
    "refused_fields": {path: sorted(names - door_requests.ALLOWED.get(path, door_requests.ALLOWED_SAMPLING))
                       for path, names in known.items()},
    "names_that_do_not_exist": {path: sorted(door_requests.ALLOWED.get(path, door_requests.ALLOWED_SAMPLING) - names)
                                for path, names in known.items()},
}))
"""


@BOTH
def test_the_door_stands_in_front_of_everything(older: bool) -> None:
    facts = found(PROGRAM, older)
    assert facts["version"] == ("0.5.16" if older else "0.5.23")
    assert facts["outermost"] == "Door"
    assert facts["hooked"] == [
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    ]
    assert facts["pickled"] == [400, "custom_logit_processor"]
    assert facts["nowhere"] == 404


@BOTH
def test_what_is_open_is_this_and_nothing_else(older: bool) -> None:
    facts = found(PROGRAM, older)
    newer = {"/ready": "public", "/ping": "public", "/v1/messages": "client", "/v1/messages/count_tokens": "client"}
    expected = {
        "/": "client",
        "/generate": "client",
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
    }
    assert {path: who for path, who in facts["open"].items() if path not in newer} == expected
    assert facts["number_closed"] > 50
    assert facts["not_closed"] == []
    assert facts["administrative_but_open"] == []


def test_fields_that_clients_may_not_set() -> None:
    refused = found(PROGRAM)["refused_fields"]
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        assert {"custom_logit_processor", "lora_path", "session_params", "return_hidden_states", "rid"} <= set(
            refused[path]
        )
    assert {"bootstrap_host", "http_worker_ipc", "input_embeds", "kv_hints", "video_data"} <= set(refused["/generate"])
    assert {"custom_params", "is_normalized", "stop_str_max_len"} <= set(refused["sampling_params"])


def test_every_field_that_is_allowed_exists() -> None:
    assert found(PROGRAM)["names_that_do_not_exist"] == {
        path: []
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "sampling_params")
    } | {"/v1/chat/completions": ["json_schema", "structural_tag"], "/v1/completions": ["structural_tag"]}


def test_an_engine_ends_rather_than_serve_without_the_door_that_was_asked_for() -> None:
    """SGLang goes on when a plugin raises an Exception."""
    done = run(PROGRAM, KIMI_DOOR="closde")
    assert done.returncode == 1
    assert "kimi: KIMI_DOOR='closde' is not allowed" in done.stderr
    assert done.stdout == ""

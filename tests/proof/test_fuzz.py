"""The fuzzer finds what it is for, in a server that has such faults, and nothing in one that has none."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis.database import InMemoryExampleDatabase
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from proof.fuzz import run
from proof.fuzz.cases import TEMPLATES
from proof.fuzz.corpus import corpus
from proof.fuzz.requests import CHAT, HttpRequest, affordable, json_request
from proof.fuzz.run import Fuzz, FuzzTarget
from proof.load.asgi import served_app

pytestmark = pytest.mark.slow

Handler = Callable[[str, dict[str, Any]], Response | None]
CLOSED = ("/flush_cache", "/update_weight_version", "/open_session", "/configure_logging")


class Body(BaseModel):
    """Body of every endpoint in the document."""

    model: str = "m"
    messages: list[dict[str, str]] | None = None
    top_logprobs: int | None = None
    image_url: str | None = None


class Server:
    """Answers like a polite server, unless `planted` does otherwise; leaked: tokens that it keeps.

    paths: what it answers; with few of them the fuzzer draws the planted request early.
    """

    def __init__(self, planted: Handler = lambda *_: None, paths: Iterable[str] = TEMPLATES) -> None:
        self.planted, self.leaked = planted, 0
        self.app = FastAPI(openapi_url=None)
        described = {"requestBody": {"content": {"application/json": {"schema": Body.model_json_schema()}}}}
        for path in paths:
            self.app.post(path, openapi_extra=described)(self._answer)
        for path in CLOSED:
            self.app.post(path)(self._closed)
        self.app.get("/openapi.json", include_in_schema=False)(self._document)
        self.app.get("/v1/models")(lambda: {"data": [{"id": "m", "max_model_len": 64}]})
        self.app.get("/v1/loads")(self._loads)

    async def _answer(self, request: Request) -> Response:
        if request.headers.get("content-type") != "application/json":  # as validate_json_request of SGLang
            return refusal("Unsupported Media Type")
        sent = await request.body()
        try:
            body = json.loads(sent)
            assert isinstance(body, dict)
        except (ValueError, AssertionError, RecursionError):
            return refusal("not a JSON object")
        if (other := self.planted(request.url.path, body)) is not None:
            return other
        if len(sent) > 1e5 or sent in refused_bodies() or any(f'"{word}"' in json.dumps(body) for word in COSTLY):
            return refusal("no")
        return answer("7", body.get("stream") is True)

    async def _closed(self, request: Request) -> Response:
        return self.planted(request.url.path, {"from": request.headers.get("x-forwarded-for")}) or refusal("no", 403)

    async def _document(self, request: Request) -> Response:
        return refusal("no", 403) if "origin" in request.headers else JSONResponse(self.app.openapi())

    async def _loads(self) -> dict[str, Any]:
        return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.leaked}]}


COSTLY = ("regex", "pattern", "structural_tag", "logit_bias")


@cache
def refused_bodies() -> frozenset[bytes]:
    sent = (send for case in corpus("m", 9527, keyed=False) if case.refused for send in case.sends)
    return frozenset(send.body for send in sent if isinstance(send, HttpRequest) and send.path in TEMPLATES)


def refusal(message: str, status: int = 400) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


def answer(text: str, stream: bool) -> Response:
    usage = {"completion_tokens": 1}
    if not stream:
        logprobs = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": [{"token": "?", "logprob": -9.0}]}]}
        choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}
        return JSONResponse({"choices": [choice], "usage": usage})
    events = [{"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
    return Response("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


def fuzzed(server: Server, folder: Path, batches: int = 100, **more: Any) -> list[str]:
    with served_app(server.app) as url:
        return Fuzz(FuzzTarget(url, **more), folder, 1).run(batches)


def test_a_healthy_server_has_no_faults(tmp_path: Path) -> None:
    with served_app(Server().app) as url:
        fuzz = Fuzz(FuzzTarget(url), tmp_path, 1)
        assert fuzz.run(60) == []
    groups = {"fields", "samples", "routes", "headers", "broken bodies", "rude clients"}
    assert groups < {group for group, status in fuzz.statuses if 200 <= status < 500}


def test_an_answer_of_500_is_found_made_small_and_sent_first_by_the_next_run(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> Response | None:
        return refusal("oops", 500) if isinstance(body.get("image_url"), list) else None

    database = InMemoryExampleDatabase()
    with served_app(Server(planted, [CHAT]).app) as url:
        [fault] = Fuzz(FuzzTarget(url), tmp_path, 1, database).run(300)
        what, command = fault.splitlines()
        assert what.startswith("<fields: /v1/chat/completions image_url>: HTTP 500")
        repeated = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
        assert " 500 " in repeated.stdout.splitlines()[0]
        [file] = tmp_path.glob("fault-*.bin")
        assert json.loads(file.read_bytes())["image_url"] == []  # the least of the lists
        assert "HTTP 500" in Fuzz(FuzzTarget(url), tmp_path, 2, database).run(1)[0]


def test_a_healthy_client_that_reads_other_tokens_is_found(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def planted(path: str, body: dict[str, Any]) -> Response | None:
        seen[path] += 1
        disturbed = seen["/v1/completions"] > 9 and body.get("temperature") == 0.0
        return answer("8", body.get("stream") is True) if disturbed else None

    assert any("'8' instead of '7'" in fault for fault in fuzzed(Server(planted), tmp_path))


def test_a_closed_endpoint_that_believes_an_address_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> Response | None:
        return JSONResponse({}) if path in CLOSED and "127.0.0.1" in (body["from"] or "") else None

    faults = [fault for fault in fuzzed(Server(planted), tmp_path, 1) if "answered what must be refused" in fault]
    assert all(any(f"<2 claimed address: {path}>" in fault for fault in faults) for path in CLOSED)


def test_a_server_that_fetches_what_a_request_names_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> None:
        for text in json.dumps(body).split('"'):
            if text.startswith("http://127.0.0.1:") and text.endswith("/trap.png"):
                httpx.get(text, timeout=10)  # at once: the run may end before a thread has asked

    assert any("fetched an address" in fault for fault in fuzzed(Server(planted, [CHAT]), tmp_path, 300))


def test_tokens_memory_and_descriptors_that_do_not_return_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(path: str, body: dict[str, Any]) -> None:
        server.leaked += isinstance(body.get("messages"), dict)

    monkeypatch.setattr(run, "SETTLE_S", 1.0)
    server = Server(planted, [CHAT])
    assert fuzzed(server, tmp_path) == [f"did not return: num_used_tokens: {server.leaked}, before 0"]
    before = {"memory": 2**30, "descriptors": 100}
    most = {"memory": 2**30 + run._ALLOWED["memory"], "descriptors": 116}
    assert run._beyond(most, before) == []
    assert run._beyond({name: held + 1 for name, held in most.items()}, before) == [
        f"memory: {most['memory'] + 1}, before {2**30}",
        "descriptors: 117, before 100",
    ]


def test_a_server_that_ends_is_found_with_the_requests_that_were_on_their_way(tmp_path: Path) -> None:
    ended = threading.Event()

    def planted(path: str, body: dict[str, Any]) -> None:
        if isinstance(body.get("image_url"), list):
            ended.set()

    [fault] = fuzzed(Server(planted, [CHAT]), tmp_path, 300, ended=ended.is_set)
    assert fault.splitlines()[0].endswith("the server ended; see its log") and "curl" in fault
    assert any(b'"image_url": [' in file.read_bytes() for file in tmp_path.glob("fault-*.bin"))


def test_expensive_requests_are_made_cheap_and_absurd_ones_stay() -> None:
    assert affordable({"max_tokens": 4000, "n": 100, "min_tokens": 2**63}) == {
        "max_tokens": 8,
        "n": 4,
        "min_tokens": 2**63,
    }
    assert affordable({"max_tokens": "4000", "n": 5000.0}) == {"max_tokens": "8", "n": 5000.0}
    assert affordable({"n": True, "max_tokens": [900]}) == {"n": True, "max_tokens": [8]}
    assert affordable({"system": [{"text": "0" * 5000}], "prompt": "A" * 300_000, "stop": "0" * 5000}) == {
        "system": [{"text": "0" * 400}],
        "prompt": "A" * 300_000,
        "stop": "0" * 5000,
    }
    assert json_request("POST", "/", {"max_tokens": None}).leave_after_s is not None

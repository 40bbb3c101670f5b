"""The fuzzer finds what it is for, in an engine that has such faults, and nothing in one that has none."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import Phase
from hypothesis.database import InMemoryExampleDatabase
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from proof.fuzz import session
from proof.fuzz.cases import TEMPLATES, Cases
from proof.fuzz.corpus import corpus
from proof.fuzz.requests import CHAT, Case, affordable, json_request
from proof.fuzz.requests import HttpRequest as Sent
from proof.fuzz.resources import MEMORY_BYTES, Resources
from proof.fuzz.rounds import try_round
from proof.fuzz.send import FuzzAnswer, FuzzSender
from proof.fuzz.session import Fuzz, FuzzFault, FuzzOutcome, FuzzTarget
from proof.fuzz.values import KINDS
from proof.load.asgi import served_app

pytestmark = pytest.mark.slow

Handler = Callable[[str, dict[str, Any]], Response | None]
CLOSED = ("/flush_cache", "/update_weight_version", "/open_session", "/configure_logging")


class Options(BaseModel):
    """A field with fields of its own."""

    include_usage: bool = False


class Body(BaseModel):
    """Body of every endpoint in the document."""

    model: str = "m"
    messages: list[dict[str, str]] | None = None
    top_logprobs: int | None = None
    image_url: str | None = None
    stream_options: Options | None = None


class Engine:
    """Answers like a polite engine, unless `planted` does otherwise; leaked: slots that it keeps.

    paths: what it answers; with few of them the fuzzer draws the planted request early.
    """

    def __init__(self, planted: Handler = lambda *_: None, paths: Iterable[str] = TEMPLATES) -> None:
        self.planted, self.leaked = planted, 0
        self.app = FastAPI(openapi_url=None)
        for path in paths:
            self.app.post(path, openapi_extra=_described())(self._answer)
        for path in CLOSED:
            self.app.post(path)(self._closed)
        self.app.get("/openapi.json", include_in_schema=False)(self._document)
        self.app.get("/v1/models")(lambda: {"data": [{"id": "m", "max_model_len": 64}]})
        self.app.get("/v1/loads")(self._loads)

    async def _answer(self, request: Request) -> Response:
        if request.headers.get("content-type") != "application/json":  # as validate_json_request of SGLang
            return refusal("Unsupported Media Type")
        try:
            body = json.loads(await request.body())
            assert isinstance(body, dict)
        except (ValueError, AssertionError, RecursionError):
            return refusal("not a JSON object")
        if (other := self.planted(request.url.path, body)) is not None:
            return other
        if not harmless(body, await request.body()):
            return refusal("no")
        return answer("7", body.get("stream") is True)

    async def _closed(self, request: Request) -> Response:
        return self.planted(request.url.path, {"from": request.headers.get("x-forwarded-for")}) or refusal("no", 403)

    async def _document(self, request: Request) -> Response:
        return refusal("no", 403) if "origin" in request.headers else JSONResponse(self.app.openapi())

    async def _loads(self) -> dict[str, Any]:
        return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.leaked}]}


def _described() -> dict[str, Any]:
    schema = Body.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["properties"]["stream_options"] = schema.pop("$defs")["Options"]
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def harmless(body: dict[str, Any], sent: bytes) -> bool:
    if len(sent) > 1e5 or sent in refused_bodies():
        return False
    numbers = all(isinstance(body.get(name), int | None) for name in ("logprobs", "top_logprobs"))
    text = json.dumps(body)
    costly = any(f'"{word}"' in text for word in ("regex", "pattern", "structural_tag", "logit_bias"))
    few = all((body.get(name) or 0) < 100 for name in ("logprobs", "top_logprobs")) if numbers else False
    return few and not costly


def known_cases() -> list[Case]:
    return corpus("m", 9527, keyed=False)


@cache
def refused_bodies() -> frozenset[bytes]:
    cases = [case for case in known_cases() if case.refused and case.group[0] in "179"]
    return frozenset(send.body for case in cases for send in case.sends if isinstance(send, Sent) and send.body)


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


def fuzzed(engine: Engine, folder: Path, requests: int = 600, **more: Any) -> FuzzOutcome:
    with served_app(engine.app) as url:
        return Fuzz(FuzzTarget(url, **more), folder, 1).run(requests)


def named(outcome: FuzzOutcome, what: str) -> list[FuzzFault]:
    return [fault for fault in outcome.faults.values() if what in fault.what]


def document() -> dict[str, Any]:
    return Engine().app.openapi()


def drawn(seed: str, most: int = 100) -> list[Case]:
    """Cases of one round against the document."""
    found: list[Case] = []
    cases = Cases(document(), "m", "http://127.0.0.1:1/trap.png")
    try_round(cases.strategy(), found.append, seed, most, (Phase.generate,))
    return found


def test_a_healthy_engine_has_no_faults(tmp_path: Path) -> None:
    outcome = fuzzed(Engine(), tmp_path)
    assert outcome.faults == {}
    assert outcome.requests >= 600
    groups = {"fields", "routes", "headers", "broken bodies"}
    assert groups | {"samples", "state", "cost"} < set(outcome.rows)
    assert not [name for name in groups if not outcome.rows[name].between(400, 499)]
    assert outcome.summary()["healthy_client"]["answers"] > 0


def test_an_answer_of_500_is_found_made_small_and_sent_first_by_the_next_run(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> Response | None:
        if path == "/v1/completions" and isinstance(body.get("top_logprobs"), str):
            return refusal("oops", 500)
        return None

    examples = InMemoryExampleDatabase()
    with served_app(Engine(planted).app) as url:
        outcome = Fuzz(FuzzTarget(url), tmp_path, 1, examples=examples).run(1200)
        fault = next(fault for fault in named(outcome, "HTTP 500") if fault.group == "fields")
        assert fault.name == "/v1/completions top_logprobs"
        repeated = subprocess.run(shlex.split(fault.command), capture_output=True, text=True, check=True)
        assert " 500 " in repeated.stdout.splitlines()[0]
        [file] = tmp_path.glob(f"fault-{[*outcome.faults.values()].index(fault)}-*.bin")
        assert json.loads(file.read_bytes())["top_logprobs"] in ("", "5")  # the least of the texts, and of the numbers
        again = Fuzz(FuzzTarget(url), tmp_path, 2, examples=examples).run(20)
        assert named(again, "HTTP 500")


def test_a_healthy_client_that_reads_other_tokens_is_found(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    def planted(path: str, body: dict[str, Any]) -> Response | None:
        seen[path] += 1
        disturbed = seen["/v1/completions"] > 20 and body.get("temperature") == 0.0
        return answer("8", body.get("stream") is True) if disturbed else None

    [fault] = named(fuzzed(Engine(planted), tmp_path, 720), "healthy client")
    assert "'8' instead of '7'" in fault.detail


def test_a_closed_endpoint_that_believes_an_address_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> Response | None:
        return JSONResponse({}) if path in CLOSED and "127.0.0.1" in (body["from"] or "") else None

    faults = named(fuzzed(Engine(planted), tmp_path, 100), "answered what must be refused")
    assert {(fault.group, fault.name) for fault in faults} >= {("2 claimed address", path) for path in CLOSED}


def test_an_engine_that_fetches_what_a_request_names_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> None:
        for text in json.dumps(body).split('"'):
            if text.startswith("http://127.0.0.1:") and text.endswith("/trap.png"):
                httpx.get(text, timeout=10)  # at once: the run may end before a thread has asked

    assert named(fuzzed(Engine(planted, [CHAT]), tmp_path, 300), "fetched an address")


def test_slots_that_do_not_return_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(path: str, body: dict[str, Any]) -> None:
        engine.leaked += isinstance(body.get("messages"), dict)

    monkeypatch.setattr("proof.fuzz.resources._SETTLE_S", 1.0)
    engine = Engine(planted, [CHAT])
    [fault] = named(fuzzed(engine, tmp_path, 250), "did not return")
    assert fault.detail == f"tokens: {engine.leaked}, before 0"


def test_memory_and_descriptors_that_do_not_return_are_named() -> None:
    before = Resources(0, 0, 0, memory=2**30, descriptors=100)
    most = before.memory + MEMORY_BYTES
    assert not list(replace(before, memory=most, descriptors=116).beyond(before))
    (found,) = replace(before, memory=most + 1).beyond(before)
    assert found == f"memory: {most / 2**20:.0f} MiB, before 1024 MiB"
    assert list(replace(before, descriptors=117, running=1).beyond(before)) == [
        "running: 1, before 0",
        "descriptors: 117, before 100",
    ]


@pytest.mark.parametrize("timely", [True, False])
def test_a_healthy_client_that_waits_is_a_fault_where_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timely: bool
) -> None:
    monkeypatch.setattr(session, "_TIMELY_FACTOR", 0.0)
    monkeypatch.setattr(session, "_AHEAD", 0)
    with served_app(Engine().app) as url:
        outcome = Fuzz(FuzzTarget(url), tmp_path, 1, timely).run(50)
    assert bool(named(outcome, "waited")) is timely


def test_what_a_client_left_behind_is_a_suspect(tmp_path: Path) -> None:
    fuzz = Fuzz(FuzzTarget("http://127.0.0.1:1"), tmp_path, 1)
    asked = json_request("POST", "/v1/completions", {"regex": "a"}, leave_after_s=1.0)
    fuzz._judge(Case("cost", "pattern", (asked,)), asked, FuzzAnswer(0, "", 1.0))
    fuzz._fault("the healthy client waited", None, "")
    [fault] = fuzz.outcome.faults.values()
    assert "/v1/completions" in fault.command


def test_an_engine_that_ends_is_found_with_the_requests_that_it_owes_an_answer(tmp_path: Path) -> None:
    ended, judged = threading.Event(), threading.Event()

    def planted(path: str, body: dict[str, Any]) -> Response | None:
        if isinstance(body.get("stream_options"), list):
            ended.set()
            judged.wait(60)
        return None

    with served_app(Engine(planted, [CHAT]).app) as url:
        outcome = Fuzz(FuzzTarget(url, ended=ended.is_set), tmp_path, 1).run(5000)
        judged.set()
    [fault] = named(outcome, "the engine ended")
    assert "curl" in fault.command
    assert any(b'"stream_options": [' in file.read_bytes() for file in tmp_path.glob("fault-*.bin"))


def test_a_signal_in_the_middle_ends_it_and_leaves_nothing_undone(tmp_path: Path) -> None:
    asked = Counter[str]()
    with served_app(Engine(lambda path, _: asked.update([path])).app) as url:
        words = ["-m", "proof.fuzz", "--url", url, "--runs", str(tmp_path), "--minutes", "2"]
        with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as fuzzing:
            while asked.total() < 200 and fuzzing.poll() is None:
                time.sleep(0.05)
            fuzzing.terminate()
            said, _ = fuzzing.communicate(timeout=120)
    assert fuzzing.returncode == 128 + signal.SIGTERM
    assert "SIGTERM received; no verdict" in said
    [found] = tmp_path.glob("*/fuzz.json")
    assert json.loads(found.read_text())["requests"] > 0


@pytest.mark.parametrize("answers", [1, 0], ids=["idle too long", "always"])
def test_a_reset_is_a_fault_only_where_a_new_connection_is_reset_too(answers: int) -> None:
    """A server that answers so many requests of each connection, and resets it at the next."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(answers + 1):
            await reader.readuntil(b"\r\n\r\n")
            if number == answers:
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def ask_twice() -> list[FuzzAnswer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, FuzzSender(f"http://{host}:{port}", None, 1) as sender:
            return [await sender.send(Sent("GET", "/health")) for _ in range(2)]

    errors = [answer.error for answer in asyncio.run(ask_twice())]
    assert all("ReadError" in error for error in errors) if answers == 0 else errors == ["", ""]


def test_a_seed_draws_the_same_cases() -> None:
    assert drawn("1") == drawn("1") != drawn("2")


def test_every_field_and_every_type_is_sent() -> None:
    sent = [
        (case.name, type(json.loads(send.body)[case.name.rpartition(" ")[2]]).__name__)
        for case in drawn("1", 1000)
        for send in case.sends
        if case.group == "fields" and "sampling_params" not in case.name and isinstance(send, Sent)
    ]
    fields = ("model", "messages", "top_logprobs", "image_url", "stream_options")
    assert {f"{path} {name}" for path in TEMPLATES for name in fields} <= {name for name, _ in sent}
    assert {type(value).__name__ for kind in KINDS for value in kind} == {kind for _, kind in sent}


def test_the_corpus_has_each_group_of_findings_that_is_a_request() -> None:
    assert {case.group[0] for case in known_cases()} == set("12456789")


def test_expensive_requests_are_made_cheap_and_absurd_ones_stay() -> None:
    assert affordable({"max_tokens": 4000, "n": 100, "min_tokens": 2**63}) == {
        "max_tokens": 8,
        "n": 4,
        "min_tokens": 2**63,
    }
    assert affordable({"max_tokens": "4000", "n": 5000.0}) == {"max_tokens": "8", "n": 5000.0}
    assert affordable({"n": True, "max_tokens": [900]}) == {"n": True, "max_tokens": [8]}
    assert affordable({"sampling_params": [{"max_new_tokens": 999.0}]}) == {
        "sampling_params": [{"max_new_tokens": 8.0}]
    }
    assert affordable({"system": [{"text": "0" * 5000}], "prompt": "A" * 300_000, "stop": "0" * 5000}) == {
        "system": [{"text": "0" * 400}],
        "prompt": "A" * 300_000,
        "stop": "0" * 5000,
    }
    assert json_request("POST", "/", {"max_tokens": None}).leave_after_s is not None


@pytest.mark.parametrize("text", ["\ud800", "it's", "$(reboot)"])
def test_the_command_sends_what_was_sent(text: str, tmp_path: Path) -> None:
    request = json_request("POST", "/generate", {"text": text})
    words = shlex.split(request.command("http://127.0.0.1:1", tmp_path / "a body.bin"))
    assert words[-2:] == [f"@{tmp_path}/a body.bin", "http://127.0.0.1:1/generate"]
    assert json.loads((tmp_path / "a body.bin").read_text())["text"] == text

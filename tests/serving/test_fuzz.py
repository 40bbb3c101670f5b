"""The fuzzer finds what it is for, in an engine that has such faults, and nothing in one that has none."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from kimi_w4a8_eagle3.fuzz.requests import affordable, json_request
from kimi_w4a8_eagle3.fuzz.session import Fault, Fuzz, Outcome
from kimi_w4a8_eagle3.server import free_port

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/v1/responses", "/v1/tokenize")
Handler = Callable[[str, dict[str, Any]], JSONResponse | None]


def engine(planted: Handler) -> FastAPI:
    """Answers like a polite engine, unless `planted` does otherwise."""
    app = FastAPI()

    async def answer(request: Request) -> JSONResponse:
        try:
            body = json.loads(await request.body())
            assert isinstance(body, dict)
        except (ValueError, AssertionError, RecursionError):
            return JSONResponse({"message": "not a JSON object"}, 400)
        if (wrong := planted(request.url.path, body)) is not None:
            return wrong
        choice = {"message": {"content": "7"}, "finish_reason": "stop", "response_token_ids": [7]}
        return JSONResponse({"choices": [choice]})

    for path in PATHS:
        app.post(path)(answer)
    app.get("/v1/models")(lambda: {"data": [{"id": "m"}]})
    return app


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    config = uvicorn.Config(app, port=free_port(), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def fuzzed(planted: Handler, folder: Path, enough: Callable[[Outcome], bool], **more: Any) -> Outcome:
    """Fuzz until `enough`, at most a minute."""
    with served(engine(planted)) as url:
        fuzz = Fuzz(url, folder, 1, **more)

        def watch(outcome: Outcome) -> None:
            if enough(outcome):
                fuzz.stop()

        return fuzz.run(60, watch)


def named(outcome: Outcome, what: str) -> list[Fault]:
    return [fault for fault in outcome.faults if what in fault.what]


def test_a_healthy_engine_has_no_faults(tmp_path: Path) -> None:
    contract = ("GET /v1/models", 200)  # the hostile requests are all POST
    outcome = fuzzed(
        lambda *_: None,
        tmp_path,
        lambda now: now.requests > 100 and len(now.healthy_s) > 3 and now.statuses[contract] > 0,
    )
    assert outcome.faults == []
    assert outcome.statuses[contract]
    assert {200, 400} <= {status for _, status in outcome.statuses}
    assert outcome.summary()["healthy_client"]["answers"] > 3


def test_an_answer_of_500_is_found_and_can_be_repeated(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> JSONResponse | None:
        return JSONResponse({"message": "oops"}, 500) if path == "/generate" else None

    with served(engine(planted)) as url:
        fuzz = Fuzz(url, tmp_path, 1)
        outcome = fuzz.run(60, lambda now: fuzz.stop() if named(now, "HTTP 500") else None)
        [fault, *_] = named(outcome, "HTTP 500")
        assert fault.endpoint == "POST /generate"
        repeated = subprocess.run(shlex.split(fault.command), capture_output=True, text=True, check=True)
        assert " 500 " in repeated.stdout.splitlines()[0]


def test_a_healthy_client_that_reads_other_tokens_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> JSONResponse | None:
        disturbed = time.monotonic() - began > 1 and path == "/v1/chat/completions"
        choice = {"message": {"content": "8"}, "finish_reason": "stop", "response_token_ids": [8]}
        return JSONResponse({"choices": [choice]}) if disturbed else None

    began = time.monotonic()
    outcome = fuzzed(planted, tmp_path, lambda now: bool(now.faults))
    assert named(outcome, "the healthy client read other tokens")


def test_an_engine_that_fetches_what_a_request_names_is_found(tmp_path: Path) -> None:
    def planted(path: str, body: dict[str, Any]) -> None:
        for text in json.dumps(body).split('"'):
            if text.startswith("http://127.0.0.1:") and text.endswith("/trap.png"):
                httpx.get(text)

    outcome = fuzzed(planted, tmp_path, lambda now: bool(now.faults))
    assert named(outcome, "fetched an address")


def test_an_engine_that_ends_is_found(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = fuzzed(lambda *_: None, tmp_path, lambda _: False, ended=lambda: time.monotonic() - began > 2)
    [fault] = named(outcome, "the engine ended")
    assert "curl" in fault.command
    assert list(tmp_path.glob("fault-*.bin"))


def test_expensive_requests_are_made_cheap_and_absurd_ones_stay() -> None:
    body = affordable("/v1/chat/completions", {"max_tokens": 4000, "n": 100, "min_tokens": 2**63})
    assert body == {"max_tokens": 16, "n": 8, "min_tokens": 2**63}
    assert affordable("/v1/completions", {"n": True, "max_tokens": -1}) == {"n": True, "max_tokens": -1}
    assert affordable("/v1/responses", {}) == {"max_output_tokens": 16}
    assert (
        affordable("/generate", {"sampling_params": {"max_new_tokens": 999}})["sampling_params"]["max_new_tokens"] == 16
    )


@pytest.mark.parametrize("text", ["\ud800", "it's", "$(reboot)"])
def test_the_command_sends_what_was_sent(text: str, tmp_path: Path) -> None:
    request = json_request("POST", "/generate", {"text": text})
    words = shlex.split(request.command("http://127.0.0.1:1", tmp_path / "a body.bin"))
    assert words[-2:] == [f"@{tmp_path}/a body.bin", "http://127.0.0.1:1/generate"]
    assert json.loads((tmp_path / "a body.bin").read_text())["text"] == text

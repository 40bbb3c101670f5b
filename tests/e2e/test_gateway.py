"""The gateway's processes before a private engine, and the same engine as SGLang alone starts it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.tiny_servers import QUESTION, TEXT, running, tiny_launch
from support.waiting import gone, until

from kimi_w4a8_eagle3.base.http import bearer
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import start_engine

pytestmark = [pytest.mark.server, pytest.mark.slow]
MODEL = "kimi-k2.5-tiny"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [3, 4]}}, "required": ["a"]}}
FIRST, SECOND = "first-key-of-this-test", "second-key-of-this-test"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"team-a {FIRST}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedEngine]:
    """An engine behind a gateway of two workers, as on a node."""
    launch = tiny_launch()
    engine = launch.engine(tmp_path_factory.mktemp("gateway") / "server.log")
    with running(FrontedEngine(engine, replace(launch.gateway, key_file=str(keys), workers=2))) as found:
        yield found


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended just now
        return ""


def ask(server: FrontedEngine, path: str, key: str = FIRST, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", json={"model": MODEL, **body}, headers=bearer(key), timeout=280)


def test_three_apis_answer_as_the_engines_chat_endpoint(server: FrontedEngine) -> None:
    url, secret = server.address
    whole = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, headers=bearer(secret), timeout=280).json()
    said = whole["choices"][0]["message"]["content"]
    chat = ask(server, "/v1/chat/completions", **QUESTION).json()
    assert chat["choices"][0]["message"]["content"] == said
    assert chat["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    off = {"max_output_tokens": 12, "temperature": 0, "chat_template_kwargs": {"thinking": False}}
    answer = ask(server, "/v1/responses", input=TEXT, store=False, **off).json()
    assert [part["text"] for item in answer["output"] for part in item["content"]] == [said]
    message = {"messages": QUESTION["messages"], "max_tokens": 12, "temperature": 0, "thinking": {"type": "disabled"}}
    assert [block["text"] for block in ask(server, "/v1/messages", **message).json()["content"]] == [said]


def test_a_stream_joins_to_the_whole_answer_and_a_forced_call_follows_its_schema(server: FrontedEngine) -> None:
    lines = ask(server, "/v1/chat/completions", **QUESTION, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    whole = ask(server, "/v1/chat/completions", **QUESTION).json()["choices"][0]["message"]["content"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == whole
    forced = {
        **QUESTION,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
        "tool_choice": "required",
    }
    answer = ask(server, "/v1/chat/completions", **forced)
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"])["a"] in (3, 4)


def test_neither_strangers_nor_clients_reach_the_engines_own_paths(server: FrontedEngine) -> None:
    assert httpx.post(f"{server.base_url}/v1/chat/completions", json=QUESTION, timeout=60).status_code == 401
    for path in ("/generate", "/flush_cache", "/abort_request", "/get_load"):
        assert ask(server, path).status_code == 404, path
    for path in ("/", "/health", "/ready", "/metrics", "/metrics/", "/v1/models", "/generate", "/docs", "//health"):
        for method in ("GET", "OPTIONS", "POST"):
            for headers in ({}, bearer(FIRST)):
                answer = httpx.request(method, f"{server.address.url}{path}", headers=headers, timeout=60)
                assert answer.status_code == 401, (method, path, answer.status_code)


def test_a_key_that_is_added_is_known_within_seconds_and_one_that_is_removed_is_not(
    server: FrontedEngine, keys: Path
) -> None:
    assert ask(server, "/v1/completions", SECOND, prompt="Tom has", max_tokens=1).status_code == 401
    keys.write_text(f"team-a {FIRST}\nteam-b {SECOND}\n")
    body = {"prompt": "Tom has", "max_tokens": 1}
    until(lambda: ask(server, "/v1/completions", SECOND, **body).status_code == 200)
    keys.write_text(f"team-a {FIRST}\n")
    until(lambda: ask(server, "/v1/completions", SECOND, **body).status_code == 401)
    assert ask(server, "/v1/completions", FIRST, **body).status_code == 200


def test_a_worker_that_dies_is_replaced_and_others_answer(server: FrontedEngine) -> None:
    gateway = psutil.Process(server.front.pid)
    workers = [one for one in gateway.children() if "spawn_main" in words(one)]
    assert len(workers) == 2
    workers[0].kill()
    until(lambda: ask(server, "/v1/chat/completions", **QUESTION).status_code == 200)
    until(lambda: len([one for one in gateway.children() if "spawn_main" in words(one)]) == 2)


def test_a_lost_engine_is_503_and_the_end_leaves_no_process(server: FrontedEngine) -> None:
    first = psutil.Process(server.front.pid)
    gateway = [first, *first.children(recursive=True)]
    server.engine.stop(0.5)
    until(lambda: ask(server, "/v1/chat/completions", **QUESTION).status_code == 503)
    server.stop(0.5)
    assert gone(*gateway)


def test_sglangs_own_command_serves_its_own_api_without_a_secret(tmp_path: Path) -> None:
    """As the article starts it: W4A8 with EAGLE3 by this plugin, behind no gateway of ours."""
    launch = tiny_launch()
    with (tmp_path / "log").open("wb") as log:
        environ = {**os.environ, **launch.env, "TMPDIR": str(tmp_path)}
        process = start_engine(launch.command, environ, log.fileno())
    try:

        def ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                return httpx.get(f"{launch.base_url}/health", timeout=60).status_code == 200
            except httpx.TransportError:
                time.sleep(0.5)
                return False

        until(ready)
        answer = httpx.post(f"{launch.base_url}/v1/chat/completions", json=QUESTION, timeout=280).json()
        assert answer["choices"][0]["message"]["content"]
        metrics = httpx.get(f"{launch.base_url}/metrics", follow_redirects=True, timeout=60).text
        assert 'kimi_moe_backend_info{backend="reference"' in metrics and "sglang:spec_accept_length" in metrics
    finally:
        process.terminate()
        process.wait(60)

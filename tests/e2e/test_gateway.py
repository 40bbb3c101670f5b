"""The gateway's own processes before a real engine without the door: the answers of the engine's own chat endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from support.tiny_servers import QUESTION, TEXT, running, tiny_launch
from support.waiting import gone, until

from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.gateway.config import GatewayConfig
from kimi_w4a8_laptop import tiny

pytestmark = [pytest.mark.server, pytest.mark.slow]
MODEL = "kimi-k2.5-tiny"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [3, 4]}}, "required": ["a"]}}
ARGUMENTS = ("env.KIMI_DOOR=off", "incremental-streaming-output=true", "constrained-json-disable-any-whitespace=true")
Both = tuple[EngineServer, str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """An engine, the gateway's address and its process."""
    folder = tmp_path_factory.mktemp("gateway")
    launch = tiny_launch(settings=ARGUMENTS)
    with running(launch.server(folder / "engine.log")) as engine:
        named = folder / "engine.json"
        named.write_text(json.dumps({"url": engine.base_url, "secret": ""}))
        port, file = free_port(), folder / "gateway.json"
        GatewayConfig(str(tiny.target_path()), MODEL, port=port, engine_file=str(named), key="k").write(file)
        command = [sys.executable, "-m", "kimi_w4a8_eagle3.gateway", str(file)]
        with (folder / "gateway.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        url = f"http://127.0.0.1:{port}"
        try:
            log = (folder / "gateway.log").read_text
            until(lambda: all(ready(url) for _ in range(16)), 120, log)  # both workers
            yield engine, url, process
        finally:
            process.kill()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": MODEL, **body}, headers={"Authorization": "Bearer k"}, timeout=280)


def test_three_apis_answer_as_the_engines_chat_endpoint(both: Both) -> None:
    engine, url, _ = both
    whole = httpx.post(f"{engine.base_url}/v1/chat/completions", json=QUESTION, timeout=280).json()
    said = whole["choices"][0]["message"]["content"]
    chat = ask(url, "/v1/chat/completions", **QUESTION).json()
    assert chat["choices"][0]["message"]["content"] == said
    assert chat["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    off = {"max_output_tokens": 12, "temperature": 0, "chat_template_kwargs": {"thinking": False}}
    answer = ask(url, "/v1/responses", input=TEXT, store=False, **off).json()
    assert [part["text"] for item in answer["output"] for part in item["content"]] == [said]
    message = {"messages": QUESTION["messages"], "max_tokens": 12, "temperature": 0, "thinking": {"type": "disabled"}}
    assert [block["text"] for block in ask(url, "/v1/messages", **message).json()["content"]] == [said]


def test_a_stream_joins_to_the_whole_answer_and_a_forced_call_follows_its_schema(both: Both) -> None:
    _, url, _ = both
    lines = ask(url, "/v1/chat/completions", **QUESTION, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    whole = ask(url, "/v1/chat/completions", **QUESTION).json()["choices"][0]["message"]["content"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == whole
    forced = {
        **QUESTION,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
        "tool_choice": "required",
    }
    answer = ask(url, "/v1/chat/completions", **forced)
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"])["a"] in (3, 4)


def test_a_client_without_a_key_is_refused_and_none_reaches_the_engines_own_paths(both: Both) -> None:
    _, url, _ = both
    assert httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=60).status_code == 401
    for path in ("/generate", "/flush_cache", "/abort_request", "/get_load"):
        assert ask(url, path).status_code == 404, path


def test_a_lost_engine_is_503_and_the_end_leaves_no_process(both: Both) -> None:
    engine, url, process = both
    family = psutil.Process(process.pid).children(recursive=True)
    engine.stop(0.5)
    until(lambda: ask(url, "/v1/chat/completions", **QUESTION).status_code == 503)
    process.terminate()
    assert process.wait(60) in (0, -15)
    assert gone(*family)

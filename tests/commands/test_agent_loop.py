"""The agent loop of docs/agents.md and our client, against a scripted server."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.scripted_server import scripted_server, whole

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.client import EngineClient

PAGE = Path(__file__).parents[2] / "docs/agents.md"
CALL = {"id": "functions.calculator:0", "type": "function", "function": {"name": "calculator", "arguments": ""}}
GIVEN = '{"expression": "33 + 14"}'


def test_the_agent_loop_of_the_page_runs(monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 30

    def said(_, raw):
        if not raw:
            return whole({"object": "list", "data": [{"id": "m", "object": "model"}]})
        last = json.loads(raw)["messages"][-1]
        message = {"role": "assistant", "content": "", "reasoning_content": "I need it.", "tool_calls": []}
        given = "{}" if last["role"] == "user" else GIVEN  # the first call fails and the model hears why
        if last["role"] == "tool" and "error" not in last["content"]:
            message["content"] = f"She has {last['content']}."
        else:
            message["tool_calls"] = [CALL | {"function": {"name": "calculator", "arguments": given}}]
        finish = "tool_calls" if message["tool_calls"] else "stop"
        return whole({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})

    with scripted_server(said) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url + "/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        exec(compile(program, str(PAGE), "exec"), {})
        last = json.loads(server.bodies[-1])["messages"]
    assert capsys.readouterr().out == "She has 47.\n"
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant", "tool"]
    assert "missing 1 required positional argument" in last[2]["content"] and last[4]["content"] == "47"
    assert last[1]["reasoning_content"] == "I need it."


@pytest.mark.parametrize("body", [{}, {"data": None}, {"data": []}, [1], b"<html>", b"\xff"], ids=repr)
def test_a_slow_or_wrong_answer_of_another_server_is_one_message(body, monkeypatch, capsys):
    monkeypatch.setattr("kimi_w4a8_eagle3.engine.client._SILENT_S", 0.01)
    slow = replace(whole(body), pause_s=0.2)
    wrong = pytest.raises(KimiError, match=r"(?s)the answer has no 'data.*/v1/models.*an answer of SGLang's API")
    with scripted_server(lambda *_: slow) as server, EngineClient(server.base_url) as client, wrong:
        client.model_name()
    assert capsys.readouterr().err == f"kimi-w4a8: {server.base_url} has not answered for 0.01 s; Ctrl-C stops\n"

"""`chat` and the agent loop of docs/agents.md against a scripted server: what is shown, what the model reads."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.scripted_server import scripted_server, streamed, whole
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.commands.chat import Screen, answer
from kimi_w4a8_eagle3.engine.client import EngineClient

PAGE = Path(__file__).parents[2] / "docs/agents.md"
CALL = {"id": "functions.calculator:0", "type": "function", "function": {"name": "calculator", "arguments": ""}}
GIVEN = '{"expression": "33 + 14"}'
COUNTS = {"prompt_tokens": 90, "completion_tokens": 21, "prompt_tokens_details": {"cached_tokens": 64}}
VERIFY = {"choices": [], "sglext": {"spec_tokens_details": {"spec_accept_length": 4.2, "spec_verify_ct": 5}}}


def pieces(*deltas, finish="stop"):
    """A stream: deltas in order, the finish, and SGLang's last two pieces."""
    told = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    return streamed([*told, end, VERIFY, {"choices": [], "usage": COUNTS}, "[DONE]"])


def thought_and_called():
    parts = [{"index": 0, "function": {"arguments": GIVEN[i : i + 3]}} for i in range(0, len(GIVEN), 3)]
    deltas = [
        {"reasoning_content": "I need "},
        {"reasoning_content": "33 + 14."},
        {"tool_calls": [CALL | {"index": 0}]},
    ]
    return pieces(*deltas, *({"tool_calls": [part]} for part in parts), finish="tool_calls")


def model(_, raw):
    """Calls the calculator, and then says what it found."""
    if not raw:
        return whole({"data": [{"id": "m"}]})
    last = json.loads(raw)["messages"][-1]
    if last["role"] == "tool":
        return pieces({"content": "It is\u2028 "}, {"content": f"{last['content']}."})
    return thought_and_called()


def test_on_a_terminal_everything_is_shown():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system="standard", highlight=False)
    messages = [{"role": "user", "content": "33 + 14?"}]
    with scripted_server(model) as server, EngineClient(server.base_url) as client:
        assert answer(client, messages, {"max_tokens": 9}, Screen(console)) == "It is\u2028 47."
    text = shown.getvalue()
    assert "\x1b[2mI need \x1b[0m\x1b[2m33 + 14.\x1b[0m\n" in text and "It is\u2028 47.\n" in text
    assert f"calculator({GIVEN}) = 47" in text and "calculator({" not in text.split("I need ")[0]
    assert "accept length 4.00, 64 of 90 prompt tokens cached" in text and "21 tokens, " in text
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    called = messages[1]["tool_calls"][0]
    assert (
        called["function"] == {"name": "calculator", "arguments": GIVEN} and messages[2]["tool_call_id"] == CALL["id"]
    )
    assert messages[1]["reasoning_content"] == "I need 33 + 14."  # the model reads its thinking between calls


def test_in_a_pipe_there_is_the_answer_alone():
    with scripted_server(model) as server:
        done = CliRunner().invoke(
            app, ["chat", "--base-url", server.base_url + "/v1", "--system", "Hi"], input=b"33+14?\xff\n"
        )
        sent = [json.loads(body) for body in server.bodies if body]
    assert (done.exit_code, done.output) == (0, "It is\u2028 47.\n")
    assert [message["content"] for message in sent[0]["messages"]] == ["Hi", "33+14?\ufffd"]
    assert sent[0]["tools"][0]["function"]["name"] == "calculator" and sent[0]["model"] == "m"


def test_without_tools_and_thinking_the_request_says_so():
    with scripted_server(lambda n, raw: pieces({"content": "47"}) if raw else model(n, raw)) as server:
        words = ["chat", "33 + 14?", "--base-url", server.base_url, "--no-tools", "--no-thinking"]
        assert CliRunner().invoke(app, words).output == "47\n"
        body = json.loads(server.bodies[-1])
    assert "tools" not in body and body["chat_template_kwargs"] == {"thinking": False}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (whole({"error": {"message": "no room"}}, 400), "no room"),
        (streamed([{"choices": []}, {"error": {"message": "out of memory"}}]), "broke the answer off"),
        (streamed([{"choices": []}]), "ended without its last line"),
        (streamed([["a"]]), "no JSON object: '[\"a\"]'"),
    ],
)
def test_a_broken_answer_is_one_message(script, message):
    with scripted_server(lambda n, raw: script if raw else model(n, raw)) as server:
        done = CliRunner().invoke(app, ["chat", "hello", "--base-url", server.base_url])
    assert isinstance(done.exception, KimiError) and message in done.exception.what


def test_a_model_that_never_stops_calling_is_stopped():
    with scripted_server(lambda n, raw: thought_and_called() if raw else model(n, raw)) as server:
        done = CliRunner().invoke(app, ["chat", "hello", "--base-url", server.base_url])
    assert "still calls tools after 32 rounds" in str(done.exception)


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

"""Messages that agents send back: calls with own ids, broken calls, the server's reasoning, switches of thinking.

CONVERSATIONS=200 asks 200 conversations on each endpoint instead of 8.
"""

import json
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from support.said import MODEL, streamed, whole

from kimi_w4a8_eagle3.chat.calculator import NAME, calculate, declaration
from kimi_w4a8_eagle3.engine.process import EngineServer
from proof.tiny.problems import WordProblem, problems

pytestmark = pytest.mark.server

COUNT = int(os.environ.get("CONVERSATIONS", "8"))
QUESTION = "Mia has 33 apples and buys 14 more. How many apples does Mia have now?"
FUNCTION = declaration()["function"]
FOREIGN: tuple[Callable[[int], str], ...] = (
    lambda at: f"call_{uuid.uuid4().hex[:24]}",
    lambda at: f"toolu_{uuid.uuid4().hex}",
    lambda at: str(uuid.uuid4()),
    lambda at: f"call_{at}",
)
Body = dict[str, Any]


def ask(server: EngineServer, path: str, body: Body) -> Body:
    answer = httpx.post(f"{server.base_url}{path}", json={"model": MODEL, **body}, timeout=600)
    assert answer.status_code == 200, answer.text
    found: Body = answer.json()
    return found


def steps(problem: WordProblem, call_id: Callable[[int], str]) -> list[tuple[str, Body, str]]:
    """Ids, arguments and results of the calls that the question alone allows to compute."""
    expressions = [step.expression for step in problem.steps if step.level == 0]
    return [
        (call_id(at), {"expression": expression}, calculate(expression)) for at, expression in enumerate(expressions)
    ]


def chat(server: EngineServer, question: str, made: list[tuple[str, Body, str]]) -> Any:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": json.dumps(arguments)}}
        for call_id, arguments, _ in made
    ]
    results = [{"role": "tool", "tool_call_id": call_id, "content": result} for call_id, _, result in made]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": calls}]
    more = {"tools": [declaration()], "temperature": 0, "max_tokens": 96, "return_token_ids": True}
    answer = ask(server, "/v1/chat/completions", {"messages": [*messages, *results], **more})
    return answer["choices"][0]["response_token_ids"], answer["usage"]["prompt_tokens"]


def responses(server: EngineServer, question: str, made: list[tuple[str, Body, str]]) -> Any:
    calls = [
        {"type": "function_call", "call_id": call_id, "name": NAME, "arguments": json.dumps(arguments)}
        for call_id, arguments, _ in made
    ]
    results = [{"type": "function_call_output", "call_id": call_id, "output": result} for call_id, _, result in made]
    items = [{"role": "user", "content": question}, *calls, *results]
    more = {"tools": [{"type": "function", **FUNCTION}], "temperature": 0, "max_output_tokens": 96}
    answer = ask(server, "/v1/responses", {"input": items, **more})
    said = [item.get("content") or [item["name"], item["arguments"]] for item in answer["output"]]
    return said, answer["usage"]["input_tokens"]


def messages(server: EngineServer, question: str, made: list[tuple[str, Body, str]]) -> Any:
    calls = [{"type": "tool_use", "id": call_id, "name": NAME, "input": arguments} for call_id, arguments, _ in made]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": result} for call_id, _, result in made]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    tool = {"name": NAME, "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    answer = ask(server, "/v1/messages", {"messages": turns, "tools": [tool], "temperature": 0, "max_tokens": 96})
    return answer["content"], answer["usage"]["input_tokens"]


@pytest.mark.parametrize("endpoint", [chat, responses, messages])
def test_ids_of_any_client_give_the_tokens_of_kimis_ids(
    eagle3: EngineServer, endpoint: Callable[[EngineServer, str, list[tuple[str, Body, str]]], Any]
) -> None:
    def both(at: int, problem: WordProblem) -> tuple[Any, Any]:
        ids: tuple[Callable[[int], str], ...] = (lambda call: f"functions.{NAME}:{call}", FOREIGN[at % len(FOREIGN)])
        right, got = (endpoint(eagle3, problem.question, steps(problem, call_id)) for call_id in ids)
        return right, got

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(both, range(COUNT), problems("held_out", COUNT, seed=41)))
    assert len(answers) == COUNT
    assert [got for _, got in answers] == [right for right, _ in answers]


def test_a_broken_call_of_the_past_is_shown_as_the_model_wrote_it(eagle3: EngineServer) -> None:
    def size(arguments: str) -> tuple[int, int]:
        function = {"name": NAME, "arguments": arguments}
        called = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        }
        turns = [{"role": "user", "content": QUESTION}, called, {"role": "tool", "tool_call_id": "x", "content": "no"}]
        items = [turns[0], {"type": "function_call", "call_id": "x", **function},
                 {"type": "function_call_output", "call_id": "x", "output": "no"}]  # fmt: skip
        answers = (
            ask(eagle3, "/v1/chat/completions", {"messages": turns, "max_tokens": 8})["usage"]["prompt_tokens"],
            ask(eagle3, "/v1/responses", {"input": items, "max_output_tokens": 8})["usage"]["input_tokens"],
        )
        return answers

    shorter, longer = size('{"expression": '), size('{"expression": 33 33 33 33')
    assert longer[0] > shorter[0] and longer[1] - shorter[1] == longer[0] - shorter[0]


def test_a_call_that_is_cut_is_not_reported_as_complete(eagle3: EngineServer) -> None:
    turn = {"messages": [{"role": "user", "content": QUESTION}], "tools": [declaration()], "max_tokens": 96}
    cut = {**turn, "stop": [" + 14"], "extra_body": {"thinking": {"type": "disabled"}}}
    with openai.OpenAI(base_url=f"{eagle3.base_url}/v1", api_key="none") as client:
        got = [whole(client, cut), streamed(client, cut)]
        done = whole(client, {**turn, "extra_body": {"enable_thinking": False}})
    assert got[0] == got[1] and got[0].finish == "stop" and got[0].thought == ""
    assert got[0].calls == ((f"functions.{NAME}:0", NAME, '{"expression": "33'),)
    assert done.finish == "tool_calls" and done.calls[0][2] == '{"expression": "33 + 14"}' and done.thought == ""


def test_an_answer_of_responses_is_accepted_when_sent_back(eagle3: EngineServer) -> None:
    body: Body = {"max_output_tokens": 96, "temperature": 0}
    body["tools"] = [{"type": "function", **FUNCTION}, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    first = ask(eagle3, "/v1/responses", {"input": QUESTION, **body})["output"]
    assert [item["type"] for item in first] == ["reasoning", "function_call"]
    assert first[0]["content"][0]["type"] == "reasoning_text"
    result = {"type": "function_call_output", "call_id": first[1]["call_id"], "output": "47"}
    turns = [{"role": "user", "content": QUESTION}, *first, result]
    second = ask(eagle3, "/v1/responses", {"input": turns, **body})["output"]
    assert "47" in second[-1]["content"][0]["text"]

"""Thinking, text and tool calls reach a stock OpenAI client whole and apart: streamed or not, alone or among forty,
with and without drafts. What is right is read from the tokens that the model wrote. Answers of a schema are of it."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from support.extent import extent
from support.said import MODEL, Request, Said, said, stock_client, streamed, whole
from support.structured_ask import asked, difference
from support.structured_cases import cases, schema_body, tool_body
from support.structured_schemas import IMPOSSIBLE
from tokenizers import Tokenizer

from kimi_w4a8_eagle3.base.calculator import NAME, calculate, declaration
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy.problems import MathProblem, problems
from kimi_w4a8_laptop import tiny
from kimi_w4a8_laptop.tiny.tokenizer import CALL_ARGUMENTS, CALL_BEGIN, CALL_END, CALLS_BEGIN, IM_END, THINK_END

pytestmark = pytest.mark.server

MARKER = re.compile(r"<\|.*?\|>|</?think>")
CALL = re.compile(f"{re.escape(CALL_BEGIN)}(.*?){re.escape(CALL_ARGUMENTS)}(.*?){re.escape(CALL_END)}", re.DOTALL)
OPERATION = re.compile(r"(\d+) ([-+*/]) (\d+) = ")
COUNT = 20  # requests, each streamed and not: forty at once


def requests() -> list[Request]:
    """In turn: a question with a calculator, the same after its first results, a question to think about, a cut."""
    made: list[Request] = []
    for at, problem in enumerate(problems(COUNT, seed=33)):
        messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
        if at % 4 == 1:
            messages += after_first_results(problem)
        with_tools = {"tools": [declaration()]} if at % 4 != 2 else {}
        made.append({"messages": messages, "max_tokens": 6 + at if at % 4 == 3 else 128, **with_tools})
    return made


def after_first_results(problem: MathProblem) -> list[dict[str, Any]]:
    """The calls of what the question alone allows to compute, and their results."""
    known = set(re.findall(r"\d+", problem.question))
    expressions = [" ".join(found) for found in OPERATION.findall(problem.solution) if {found[0], found[2]} <= known]
    arguments = [json.dumps({"expression": expression}) for expression in expressions]
    calls = [
        {"id": f"functions.{NAME}:{at}", "type": "function", "function": {"name": NAME, "arguments": argument}}
        for at, argument in enumerate(arguments)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": calculate(argument)}
        for call, argument in zip(calls, arguments, strict=True)
    ]
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I need {' and '.join(expressions)}.",
            "tool_calls": calls,
        },
        *results,
    ]


def written(answer: Any, tokenizer: Tokenizer) -> Said:
    """Read the tokens by the format's definition; only for answers that are not cut."""
    raw = tokenizer.decode(answer.response_token_ids, skip_special_tokens=False).removesuffix(IM_END)
    thought, _, rest = raw.partition(THINK_END)
    text, _, section = rest.partition(CALLS_BEGIN)
    calls = tuple(
        (call_id, call_id.split(".")[1].split(":")[0], arguments) for call_id, arguments in CALL.findall(section)
    )
    return Said(thought, text, calls, "tool_calls" if calls else "stop")


@pytest.fixture(scope="module")
def right(plain: EngineServer) -> list[tuple[Request, Said]]:
    """Requests, and what the model without drafts writes."""
    tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
    sent = requests()
    with stock_client(plain.base_url) as client, ThreadPoolExecutor(8) as pool:
        create = partial(client.chat.completions.create, model=MODEL, temperature=0)
        done = pool.map(lambda request: create(**request, extra_body={"return_token_ids": True}).choices[0], sent)
        answers = [said(one) if one.finish_reason == "length" else written(one, tokenizer) for one in done]
    assert {bool(answer.calls) for answer in answers} == {True, False}
    assert "length" in {answer.finish for answer in answers}
    return list(zip(sent, answers, strict=True))


@pytest.mark.parametrize(
    ("drafts", "concurrency"), [(True, 1), (True, 8), (True, 40), (False, 8), (False, 40)], ids=str
)
def test_nothing_is_lost_and_nothing_mixed_up(
    eagle3: FrontedEngine, plain: EngineServer, right: list[tuple[Request, Said]], drafts: bool, concurrency: int
) -> None:
    known = right[: max(concurrency // 2, 2)]
    jobs: list[tuple[Callable[[Any, Request], Said], Request]] = [
        (ask, request) for request, _ in known for ask in (whole, streamed)
    ]
    server = eagle3 if drafts else plain
    with stock_client(server.base_url) as client, ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda job: job[0](client, job[1]), jobs))
    for (request, expected), *got in zip(known, answers[::2], answers[1::2], strict=True):
        assert got == [expected, expected], request
        for text in (expected.thought, expected.text, *(arguments for *_, arguments in expected.calls)):
            assert not MARKER.search(text)


@pytest.mark.slow
def test_answers_of_a_schema_are_of_it_and_those_of_the_server_without_drafts(
    eagle3: FrontedEngine, plain: EngineServer
) -> None:
    """Each form of asking for one, with thinking and without; the long form asks 500."""
    made = cases(extent(8, 500), 1, MODEL)
    expected, found = asked(plain.base_url, made), asked(eagle3.base_url, made)
    pairs = zip(made, expected, found, strict=True)
    assert [(case.name, fault) for case, *both in pairs if (fault := difference(case, *both))] == []
    assert sum(answer.complete for answer in found) >= 6 * len(made) // 8  # the others may run to their limit


def test_a_schema_that_no_answer_can_follow_is_refused(eagle3: FrontedEngine) -> None:
    for name, schema in IMPOSSIBLE.items():
        arguments = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        bodies = [schema_body(MODEL, "How many?", schema), tool_body(MODEL, "How many?", arguments)]
        for body in bodies[: 1 if schema == {"$ref": "#"} else 2]:  # as arguments it has no end, and is cut
            answer = httpx.post(f"{eagle3.base_url}/v1/chat/completions", json={**body, "max_tokens": 8}, timeout=60)
            assert 400 <= answer.status_code < 500, (name, answer.text)

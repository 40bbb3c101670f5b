"""SGLang's HIP path on the virtual node: its tokens are those of the engine on a CPU, with and without drafts.

`make virtual-mi325x` runs it, because two engines on the virtual node take a minute and a half.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import httpx
import pytest
from support import virtual_steps
from support.sampled import REQUESTS, answers
from support.virtual_servers import virtual_server

from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy.greedy_match import divergences
from kimi_w4a8_lab.accuracy.prompts import Prompt
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_lab.base.counters import acceptance_from_counters, scrape
from kimi_w4a8_laptop.virtual import library, step_counts
from proof.tiny.problems import problems

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif("KIMI_VIRTUAL_TESTS" not in os.environ, reason="make virtual-mi325x runs it"),
    pytest.mark.skipif(library.compiler() is None, reason="the virtual device is compiled with g++"),
]
MODEL = "kimi-k2.5-tiny"
PROMPTS = [Prompt("maths", problem.question) for problem in problems("held_out", 4, seed=22)]
QUESTIONS = [problem.question for problem in problems("held_out", 1, seed=21)]
# Stronger than REQUESTS, so that short answers show what a parameter does. The prompts are in the prefix cache before,
# because a prompt that is not takes another path through attention, which rounds otherwise.
FIRST = [
    {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 1} for question in QUESTIONS
]
MIXED = [
    {"messages": [{"role": "user", "content": question}], **params, "max_tokens": 20}
    | ({"temperature": 2.0} if params["temperature"] else {})
    | ({"repetition_penalty": 2.0} if "frequency_penalty" in params else {})
    | ({"min_tokens": 16} if "min_tokens" in params else {})
    | ({"chat_template_kwargs": {"thinking": False}} if "response_format" in params else {})
    for params in REQUESTS.values()
    for question in QUESTIONS
]
# The built-in model's logits are bfloat16 numbers below 32, which are 0.125 apart, and two of them may round apart.
ROUNDING = 0.25  # nats

Answers = list[list[tuple[Any, ...]]]


class Found(NamedTuple):
    """Answers without drafts and with them, what its engine says of itself, and the accept length."""

    plain: Answers
    drafts: Answers
    info: dict[str, Any]
    accepted: float
    greedy: list[Tokens]
    steps: dict[str, dict[str, virtual_steps.Step]]  # what one costs, by kind


def mixed_answers(server: EngineServer) -> Answers:
    answers(server.base_url, FIRST, 1)
    return answers(server.base_url, MIXED, 8)


def greedy_tokens(server: EngineServer) -> list[Tokens]:
    with TokenClient(server.base_url) as probe:
        return [probe.greedy(probe.chat_ids(prompt.text, MODEL), 24, with_top=True) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("virtual")
    (file := folder / "steps").touch()
    environ = {step_counts.FILE: str(file)}
    with virtual_server(False, folder / "plain", **environ) as server:
        plain, greedy = mixed_answers(server), greedy_tokens(server)
        steps = {"plain": virtual_steps.measure(server, file, 1)}
    with virtual_server(True, folder / "drafts", **environ) as server:
        before = scrape(server.base_url)
        drafts = mixed_answers(server)
        accepted = acceptance_from_counters(scrape(server.base_url).since(before), 4)
        steps |= {"drafts": virtual_steps.measure(server, file, 1)}
        info = httpx.get(f"{server.base_url}/server_info").json()
    return Found(plain, drafts, info, accepted.length if accepted else 0.0, greedy, steps)


def test_it_runs_the_hip_path_of_the_recipe(layout: Found) -> None:
    found = {name: layout.info[name] for name in ("device", "attention_backend", "disable_overlap_schedule")}
    assert found == {"device": "cuda", "attention_backend": "aiter", "disable_overlap_schedule": False}
    assert layout.info["speculative_algorithm"] == "EAGLE3" and layout.accepted > 1.2  # hot requests accept little


def test_drafts_change_no_token_of_any_request(layout: Found) -> None:
    kinds = [kind for kind in REQUESTS for _ in QUESTIONS]
    assert {kind for kind, want, got in zip(kinds, layout.plain, layout.drafts, strict=True) if want != got} == set()


def test_what_the_requests_ask_for_happens(layout: Found) -> None:
    of = {kind: layout.plain[len(QUESTIONS) * i :][: len(QUESTIONS)] for i, kind in enumerate(REQUESTS)}
    assert of["greedy"] != of["sampled"]
    most = [max(map(tokens.count, tokens)) for kind in ("greedy", "all penalties") for [(*_, tokens)] in of[kind][:1]]
    assert most[1] < most[0]  # penalized, a token is repeated less
    assert all(len(choice[3]) >= 16 for answer in of["min_tokens"] for choice in answer)
    assert all(len({choice[3] for choice in answer}) > 1 for answer in of["choices"][:1])
    assert all(choice[1].lstrip().startswith("{") for answer in of["schema"] for choice in answer)


def test_its_greedy_tokens_are_those_of_the_engine_on_a_cpu_but_for_rounding(
    layout: Found, eagle3: EngineServer
) -> None:
    parted = divergences(PROMPTS, greedy_tokens(eagle3), layout.greedy, 1)
    assert [str(one) for one in parted if one.gap is None or one.gap > ROUNDING] == []
    assert len(parted) < len(PROMPTS)


def test_a_step_without_new_requests_costs_what_is_recorded(layout: Found) -> None:
    """Launches, allocations, copies, waits and Python calls; `python -m support.virtual_steps --save` records them."""
    recorded = json.loads(virtual_steps.SAVED.read_text())
    for title, kinds in layout.steps.items():
        for kind, found in kinds.items():
            wanted = recorded[title]["1"][kind]
            assert found.pop("python calls") <= 1.1 * wanted.pop("python calls"), (title, kind)
            assert found == wanted, (title, kind)

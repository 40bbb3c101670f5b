"""EAGLE3 changes speed, not answers: the same tokens with and without, greedy, sampled, seeded or penalized."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.acceptance import accepted
from support.reduced_draft import write_reduced_draft
from support.sampled import BODIES, QUESTIONS, REQUESTS, answers
from support.tiny_servers import started, tiny_launch

from kimi_w4a8_eagle3.base.http import Address, bearer
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient, Refused
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_laptop import exact, tiny

pytestmark = pytest.mark.server

LONG = " ".join(p.question for p in problems(30, seed=5))  # several hundred tokens
MIXED = ["7", "Hello!", "Wie viele Äpfel hat Zoë? 三个苹果 🍎", LONG, "Count: 1 2 3", "a" * 200, LONG[:400], "?"]


def tokens(engine: Address, contents: list[str], concurrency: int, max_tokens: int) -> list[tuple[int, ...]]:
    with EngineClient(*engine) as client:
        return [answer.token_ids for answer in client.chat_all(contents, max_tokens, concurrency)]


def written(engine: Address, ids: tuple[int, ...], most: int) -> list[int]:
    """Ask for `most` tokens, beyond the end of the answer."""
    params = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params}
    answer = httpx.post(f"{engine.url}/generate", json=body, headers=bearer(engine.key), timeout=300)
    return answer.raise_for_status().json()["output_ids"]


def seeded(engine: Address, prompts: list[tuple[int, ...]]) -> tuple[list[exact.ExactRequest], list[Tokens]]:
    params = {"temperature": 1.0, "max_new_tokens": 48}
    asked = [exact.ExactRequest("seeded", ids, params | {"sampling_seed": seed}) for seed, ids in enumerate(prompts)]
    with TokenClient(*engine) as probe:
        return asked, probe.all(lambda request: exact.ask(probe, request), asked, 8)


def test_problems_mixed_lengths_and_scripts_give_identical_tokens(eagle3, plain):
    questions = [*MIXED, *(p.question for p in problems(8))]
    expected = tokens(plain.address, questions, 8, 48)
    assert all(expected[len(MIXED) :])  # every answer to a problem has tokens
    assert tokens(eagle3.address, questions, 8, 48) == expected


def test_two_engines_of_one_node_start_at_their_gpus(eagle3, plain):
    """SGLang looks the GPU up in the list of NUMA nodes: with a list for each rank alone, the second engine ends."""
    for engine, first in ((eagle3, 0), (plain, 4)):
        with EngineClient(*engine.address) as client:
            info = client.server_info()
        assert (info["base_gpu_id"], info["numa_node"]) == (first, [0] * 4 + [1] * 4)


def test_drafts_are_accepted_and_both_ways_to_count_agree(eagle3, client):
    questions = [p.question for p in problems(20, seed=2)]
    answered, counted = accepted(eagle3.address, 4, partial(client.chat_all, questions, 64, 4))
    reported = acceptance_from_histograms((a.accepted_histogram for a in answered), 4)
    assert counted is not None and reported is not None
    assert counted.steps == reported.steps
    assert counted.length >= 2.5
    # A verify step may accept tokens beyond the end of an answer: those count for the step, not for the answer.
    assert reported.length == pytest.approx(counted.length, abs=0.25)
    assert reported.per_position[0] >= reported.per_position[1] >= reported.per_position[2] > 0


def test_the_start_up_check_sees_acceptance_and_its_absence(eagle3, plain, client):
    assert startup_check.require_acceptance(startup_check.require_answers(client, 1), 4, "draft").length > 1.5
    with EngineClient(*plain.address) as unspeculated, pytest.raises(Exception, match="does not speculate"):
        startup_check.require_acceptance(startup_check.ask(unspeculated, 1), 4, "draft")


def test_the_context_that_the_gateway_names_can_be_filled_and_no_token_more(eagle3, plain):
    """SGLang keeps two tokens for itself, or those of a verify step, which it counts with the prompt."""
    rooms, written = [], []
    for server in (plain, eagle3):
        with EngineClient(server.base_url) as client:
            [model] = client._call("GET", "/v1/models")["data"]
            rooms.append(model["max_model_len"])
            ids = client._call("POST", "/tokenize", {"model": model["id"], "prompt": LONG})["tokens"]
            prompt, body = (ids * 40)[: rooms[-1] - 8], {"model": model["id"], "temperature": 0, "ignore_eos": True}
            whole = client._call("POST", "/v1/completions", {**body, "prompt": prompt, "max_tokens": 8})
            written.append(whole["usage"]["completion_tokens"])
            with pytest.raises(Refused, match="400"):
                client._call("POST", "/v1/completions", {**body, "prompt": prompt, "max_tokens": 9})
    assert written == [8, 8] and rooms == [8190, 8188]


@pytest.mark.slow
def test_a_draft_with_fewer_tokens_changes_no_answer_up_to_the_end_of_the_context(plain, tmp_path: Path) -> None:
    draft = write_reduced_draft(tmp_path / "draft")
    report = preflight(tiny.target_path(), draft)
    assert report.ok and any("proposes 560 of the target's 640 tokens" in note for note in report.notes)
    questions = [p.question for p in problems(12, seed=3)]
    expected = tokens(plain.address, questions, 8, 48)
    with contextmanager(started)(
        tiny_launch(settings=(f"draft.repo={draft}", "context-length=256")), tmp_path
    ) as server:
        answered, found = accepted(server.address, 4, partial(tokens, server.address, questions, 8, 48))
        assert answered == expected
        with TokenClient(
            *server.address
        ) as probe:  # the last steps have slots beyond the context, whose end SGLang keeps free
            prompt = probe.chat_ids(LONG, probe.model_name())[:232]
            last = written(server.address, prompt, 20)  # four less than the context, which a verify step takes
            assert last == written(plain.address, prompt, 20) and len(last) == 20
            ids = [probe.chat_ids(question, probe.model_name()) for question in questions]
        drawn = [seeded(engine.address, ids) for engine in (plain, server)]
        assert exact.differences(*drawn[0], drawn[1][1], "EAGLE3", 8) == []
        assert tokens(server.address, questions[:1], 1, 48) == expected[:1]
    assert found is not None and found.length > 2.5


@pytest.fixture(scope="module")
def expected(plain) -> list[list[tuple[Any, ...]]]:
    return answers(Address(plain.base_url), BODIES, 6)


@pytest.mark.parametrize("concurrency", [4, 24])
def test_eagle3_changes_no_token_of_any_request(eagle3, expected, concurrency):
    kinds = [kind for kind in REQUESTS for _ in QUESTIONS]
    found = answers(Address(eagle3.base_url), BODIES, concurrency)
    different = {kind for kind, want, got in zip(kinds, expected, found, strict=True) if want != got}
    assert not different


def test_what_the_requests_ask_for_happens(expected):
    by_kind = {kind: expected[len(QUESTIONS) * i :][: len(QUESTIONS)] for i, kind in enumerate(REQUESTS)}
    assert by_kind["greedy"] != by_kind["hot"] and by_kind["greedy"] != by_kind["frequency"]
    assert all(len(choice[3]) >= 40 for answer in by_kind["min_tokens"] for choice in answer)
    assert any(len({choice[3] for choice in answer}) > 1 for answer in by_kind["choices"])
    assert all(len(answer) == 3 for answer in by_kind["choices"])


def test_choices_are_the_answers_to_the_seeds_that_follow(eagle3):
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 1.8}
    [choices] = answers(Address(eagle3.base_url), [body | {"seed": 70, "n": 3}], 1)
    alone = answers(Address(eagle3.base_url), [body | {"seed": 70 + i} for i in range(3)], 3)
    assert choices == [answer[0] for answer in alone]


def test_without_a_seed_every_answer_is_drawn_anew(eagle3):
    body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "temperature": 2.0}
    assert len({answer[0][3] for answer in answers(Address(eagle3.base_url), [body] * 6, 6)}) > 1
    seeded = [body | {"seed": 5}] * 3
    assert len({answer[0][3] for answer in answers(Address(eagle3.base_url), seeded, 3)}) == 1


@pytest.mark.parametrize("seed", ["x", 1.5, 2**70])
def test_a_seed_that_is_no_integer_is_refused_by_both(eagle3, plain, seed):
    body = {"model": "kimi-k2.5-tiny", "messages": [{"role": "user", "content": "7"}], "seed": seed}
    for server in (eagle3, plain):
        reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body)
        assert reply.status_code == 400 and "seed: Input should be a valid integer" in reply.text

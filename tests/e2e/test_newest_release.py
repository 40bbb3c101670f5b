"""The newest supported SGLang beside the pinned one: serving with EAGLE3, the same tokens, and every hook at work."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.acceptance import accepted
from support.kimi_checkpoint import seeing
from support.pictures import asking_about
from support.said import stock_client
from support.sampled import BODIES, answers
from support.sglang_program import VERSIONS, environment
from support.tiny_servers import ask as ask_plainly
from support.tiny_servers import faulty_engine, running, tiny_launch
from support.waiting import until
from tokenizers import Tokenizer

from kimi_w4a8_eagle3.base.calculator import declaration
from kimi_w4a8_eagle3.base.collection import REQUESTS, VARIABLE, Consent
from kimi_w4a8_eagle3.base.http import Address, bearer
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_lab.accuracy.problems import parse_answer, problems
from kimi_w4a8_lab.draft.collected import read_requests
from kimi_w4a8_laptop import tiny

pytestmark = [pytest.mark.server, pytest.mark.slow]

POOL = 32768  # tokens, half of what the recipe asks for
QUESTIONS = [problem.question for problem in problems(8)]


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedEngine]:
    """One server for all tests here: with faults that a request can ask for, a pool that the guard must cap, and the
    prefix cache, on which requests hold locks; and with its vision tower."""
    draft_row = 128  # elements that the built-in draft keeps of a token in one buffer
    guard = ("env.KIMI_PAGE_GUARD=force", f"env.KIMI_PAGE_GUARD_INT_MAX={POOL * draft_row}")
    eyes = f"model.repo={seeing(tmp_path_factory.mktemp('seeing') / 'target')}"
    (folder := tmp_path_factory.mktemp("collected")).chmod(0o700)
    Consent(share=1.0).write(folder)
    launch = tiny_launch(settings=("disable-radix-cache=false", eyes, f"env.{VARIABLE}={folder}", *guard))
    launch = replace(launch, env={**launch.env, "PYTHONPATH": environment(newest=True)["PYTHONPATH"]})
    engine = faulty_engine(launch, "support.planted_faults", tmp_path_factory.mktemp("newest"))
    with running(FrontedEngine(engine, launch.gateway)) as server:
        yield server


def ask(server: FrontedEngine, **more: object) -> httpx.Response:
    body = {"model": "kimi-k2.5-tiny", "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 24}
    body["temperature"] = 0  # else drawn without a seed, and two right answers differ
    body["separate_reasoning"] = False  # what is thought is compared, too
    return httpx.post(f"{server.base_url}/v1/chat/completions", json={**body, **more}, timeout=60)


def greedy(server: FrontedEngine) -> list[tuple[int, ...]]:
    with EngineClient(*server.address) as client:
        return [answer.token_ids for answer in client.chat_all(QUESTIONS, 64, 4)]


def test_it_is_the_newest_release(newest: FrontedEngine, eagle3: FrontedEngine) -> None:
    found = tuple(httpx.get(f"{server.base_url}/server_info").json()["version"] for server in (eagle3, newest))
    assert found == VERSIONS


def test_both_releases_give_the_same_tokens_and_drafts_are_accepted(
    newest: FrontedEngine, eagle3: FrontedEngine
) -> None:
    """The pinned release is lossless (test_speculation.py); so is one that answers with its tokens."""
    answers, found = accepted(newest.address, 4, partial(greedy, newest))
    assert answers == greedy(eagle3)
    assert found is not None and found.length >= 2.5


def test_both_releases_sample_and_penalize_alike(newest: FrontedEngine, eagle3: FrontedEngine) -> None:
    """The pinned release has plain decoding's tokens (test_speculation.py)."""
    bodies = [body for body in BODIES[::2] if "response_format" not in body]  # grammars: another xgrammar
    assert answers(Address(newest.base_url), bodies, 4) == answers(Address(eagle3.base_url), bodies, 4)


def test_a_call_that_the_token_limit_cuts_ends_as_cut(newest: FrontedEngine, eagle3: FrontedEngine) -> None:
    limit = 24  # in the middle of the call's arguments
    function = declaration()["function"]
    common = {"model": "kimi-k2.5-tiny", "temperature": 0, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    message = {**common, "max_tokens": limit, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    response: dict[str, Any] = {**common, "max_output_tokens": limit, "tools": [{"type": "function", **function}]}
    response["input"] = response.pop("messages")
    chat = {**common, "max_tokens": limit, "tools": [declaration()]}
    for server in (newest, eagle3):
        for stream in (False, True):
            said = _last(server, "/v1/chat/completions", {**chat, "stream": stream})
            assert said["choices"][0]["finish_reason"] == "length"
            said = _last(server, "/v1/responses", {**response, "stream": stream})
            said = said.get("response", said)
            assert said["status"] == "incomplete" and said["incomplete_details"] == {"reason": "max_output_tokens"}
            assert said["output"][-1]["type"] == "function_call" and said["output"][-1]["status"] == "incomplete"
            assert said["usage"]["output_tokens"] == limit
            said = _last(server, "/v1/messages", {**message, "stream": stream})
            assert said.get("delta", said)["stop_reason"] == "max_tokens"
            said = _last(server, "/v1/responses", {**response, "stream": stream, "max_output_tokens": 1})
            assert said.get("response", said)["usage"]["output_tokens"] == 1


def _last(server: FrontedEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the last event of a stream that says why it ended."""
    answer = httpx.post(f"{server.base_url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        whole: dict[str, Any] = answer.json()
        return whole
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    ends = [event for event in events if event.get("type") not in ("message_stop",) and event.get("choices") != []]
    last: dict[str, Any] = ends[-1]
    return last


def test_a_stock_client_shows_pictures_and_the_prefix_cache_knows_them_apart(newest: FrontedEngine) -> None:
    with stock_client(newest.base_url) as client:
        said = [
            client.chat.completions.create(
                model="kimi-k2.5-tiny", messages=asking_about(number), max_tokens=96, temperature=0
            )
            for number in (15, 15, 42)
        ]
    assert [parse_answer(answer.choices[0].message.content or "") for answer in said] == [19, 19, 46]
    used = [answer.usage for answer in said]
    cached = [usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0 for usage in used]
    assert cached[1] > cached[2] >= 0 and cached[1] > used[1].prompt_tokens / 2


def test_the_page_guard_caps_its_pool(newest: FrontedEngine) -> None:
    found = read_once(*newest.address)
    assert 0 < found.total("kimi_page_guard_pool_tokens") <= POOL == found.total("kimi_page_guard_cap_tokens")


def test_requests_are_collected_as_the_pinned_release_collects_them(newest: FrontedEngine) -> None:
    answer = ask(newest, messages=[{"role": "user", "content": "What is 41 plus 17?"}]).json()
    files = Path(newest.engine.env[VARIABLE], REQUESTS)
    until(lambda: any(answer["id"].encode() in file.read_bytes() for file in files.glob("*/[!.]*")))
    (found,) = [one for file in files.glob("*/*") for one in read_requests(file) if one.id == answer["id"]]
    tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
    assert "41 plus 17" in tokenizer.decode(list(found.prompt))
    assert tokenizer.decode(list(found.answer)).strip() in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("place", ["TAKE-IN", "DECODE", "READING", "OUTPUT"])
def test_a_request_that_raises_ends_alone(newest: FrontedEngine, place: str) -> None:
    right = ask(newest).json()["choices"][0]["message"]["content"]
    bad = ask_plainly(newest.engine, stop=[place])  # the gateway cuts at stop strings itself
    assert bad.status_code == 500 and "TypeError" in bad.text
    assert ask(newest).json()["choices"][0]["message"]["content"] == right


def test_an_empty_prompt_is_refused_and_the_engine_goes_on(newest: FrontedEngine, eagle3: FrontedEngine) -> None:
    """Without a gateway before it: SGLang 0.5.23 ended."""
    for url, secret in (newest.address, eagle3.address):
        for body in ({"text": ""}, {"text": ["Tom", ""]}, {"input_ids": []}, {"text": "Tom has", "stream": False}):
            answer = httpx.post(f"{url}/generate", json=body, headers=bearer(secret), timeout=280)
            assert answer.status_code == (200 if body.get("text") == "Tom has" else 400), answer.text

"""SGLang's HIP path on the virtual node: drafts change no token in any layout.

Two engines run on the node in each layout: one without drafts on its first GPUs, and one with drafts on its last.
`make virtual-mi325x` runs all, because that takes minutes. `make test` serves one short batch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sampled import REQUESTS, answers
from support.virtual_servers import virtual_server

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.releases import SGLANG_NEWEST
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy.comparison import greedy_differences
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.prompts import Prompt
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_lab.base.counters import acceptance_from_counters, scrape
from kimi_w4a8_laptop.virtual import library

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(2400),  # beside other work: a layout takes minutes
    pytest.mark.skipif(library.compiler() is None, reason="the virtual device is compiled with g++"),
]
LONG = pytest.mark.skipif("KIMI_VIRTUAL_TESTS" not in os.environ, reason="make virtual-mi325x runs it")
MODEL = "kimi-k2.5-tiny"
PROMPTS = [Prompt("maths", problem.question) for problem in problems(4, seed=22)]
KINDS = {**REQUESTS, "logprobs": {"temperature": 1.0, "seed": 10, "top_logprobs": 2}}
QUESTIONS = [problem.question for problem in problems(13, seed=21)]
# The built-in model's logits are bfloat16 numbers below 32, which are 0.125 apart, and two of them may round apart.
ROUNDING = 0.25  # nats
NUMPY = {library.DRAW: "reference"}
APART = {"module": "support.planted_faults", "KIMI_PLANTED_RANKS": "1"}  # rank 1 has other logits

Answers = list[list[tuple[Any, ...]]]


# Prefills of more tokens in sum take chunked KV: 131,072 on a GPU.
CHUNKED = {"SGLANG_MAX_KV_CHUNK_CAPACITY": "64"}
# `agent` compiles the graphs of at most 32 requests with torch.compile, and not the larger ones.
BOTH_SIDES = ("max-running-requests=40", "cuda-graph-bs-decode=[16,40]")


class Layout(NamedTuple):
    """Settings of the engines, questions that are asked in each kind of request, and how many requests run at a time.

    plain: settings of the engine without drafts alone. given: of `virtual_server`. compiled: by torch.compile, which
    takes each process 10 s.
    """

    questions: int = 4
    at_once: int = 16
    settings: tuple[str, ...] = ("max-running-requests=16", "cuda-graph-bs-decode=[16]")
    plain: tuple[str, ...] = ()
    newest: bool = False
    given: dict[str, str] = NUMPY
    compiled: bool = True


LAYOUTS = {
    "one GPU": Layout(3, 40, BOTH_SIDES),
    "interpreted": Layout(1, settings=("cuda-graph-bs-decode=[8]",), given=CHUNKED, compiled=False),
    "newest release": Layout(3, 40, BOTH_SIDES, newest=True),
    "DP attention 2": Layout(
        2, settings=("tp-size=2", "dp-size=2", "enable-dp-attention=true", "enable-attn-tp-input-scattered=false")
    ),
    "EP 2": Layout(1, settings=("tp-size=2", "ep-size=2", "cuda-graph-bs-decode=[8]"), compiled=False),
    # Without drafts `w4a8` keeps the custom all-reduce; with them `agent` has RCCL's.
    "TP 2, ranks apart": Layout(
        2, settings=("tp-size=2", *Layout().settings), plain=("disable-custom-all-reduce=false",), given=NUMPY | APART
    ),
}


class Found(NamedTuple):
    """Answers without drafts and with them, and what the engine with drafts says of itself."""

    layout: Layout
    plain: Answers
    drafts: Answers
    info: dict[str, Any]
    accepted: float
    greedy: list[Tokens]


def mixed(questions: list[str], kinds: Iterable[str] = KINDS) -> list[dict[str, Any]]:
    """Return a request of each kind for each question: stronger than REQUESTS, so that a short answer shows it."""
    return [
        {"model": MODEL, "messages": [{"role": "user", "content": question}], **params, "max_tokens": 20}
        | ({"temperature": 2.0} if params["temperature"] else {})
        | ({"repetition_penalty": 2.0} if "frequency_penalty" in params else {})
        | ({"min_tokens": 16} if "min_tokens" in params else {})
        | ({"chat_template_kwargs": {"thinking": False}} if "response_format" in params else {})
        for params in map(KINDS.__getitem__, kinds)
        for question in questions
    ]


def mixed_answers(server: EngineServer, questions: list[str], at_once: int) -> Answers:
    """Return the answers to all kinds, so many at a time, when the prefix cache holds their prompts.

    A prompt that the cache does not hold takes another path through attention, which rounds otherwise.
    """
    answers(server.address, [body | {"max_tokens": 1} for body in mixed(questions, ("greedy", "schema"))], 1)
    return answers(server.address, mixed(questions), at_once)


def info_of(server: EngineServer) -> dict[str, Any]:
    with EngineClient(*server.address) as client:
        return client.server_info()


def greedy_tokens(server: EngineServer) -> list[Tokens]:
    with TokenClient(*server.address) as probe:
        return [probe.greedy(probe.chat_ids(prompt.text, MODEL), 24, with_top=True) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder, layout = tmp_path_factory.mktemp("virtual"), LAYOUTS[request.param]
    questions = QUESTIONS[: layout.questions]
    common = {"newest": layout.newest, **layout.given}
    settings = (*layout.settings, f"enable-torch-compile={json.dumps(layout.compiled)}")
    engines = (
        virtual_server(False, folder / "plain", *settings, *layout.plain, "base-gpu-id=0", **common),
        virtual_server(True, folder / "drafts", *settings, "base-gpu-id=4", **common),
    )
    with ExitStack() as both, ThreadPoolExecutor(2) as pool:
        reference, server = pool.map(both.enter_context, engines)
        before = scrape(server.address)
        plain, drafts = pool.map(lambda one: mixed_answers(one, questions, layout.at_once), (reference, server))
        accepted = acceptance_from_counters(scrape(server.address).since(before), 4)
        greedy, info = greedy_tokens(reference), info_of(server)
    return Found(layout, plain, drafts, info, accepted.length if accepted else 0.0, greedy)


@LONG
def test_it_runs_the_hip_path_of_the_recipe(found: Found) -> None:
    said = {name: found.info[name] for name in ("device", "attention_backend", "disable_overlap_schedule")}
    assert said == {"device": "cuda", "attention_backend": "aiter", "disable_overlap_schedule": False}
    assert found.info["enable_torch_compile"] is found.layout.compiled and found.info["torch_compile_max_bs"] == 32
    assert (found.info["version"] == SGLANG_NEWEST) is found.layout.newest
    assert found.info["speculative_algorithm"] == "EAGLE3" and found.accepted > 1.2  # hot requests accept little


@LONG
def test_drafts_change_no_token_of_any_request(found: Found) -> None:
    kinds = [kind for kind in KINDS for _ in range(found.layout.questions)]
    changed = [kind for kind, *both in zip(kinds, found.plain, found.drafts, strict=True) if both[0] != both[1]]
    assert changed == []


@LONG
def test_what_the_requests_ask_for_happens(found: Found) -> None:
    size = found.layout.questions
    of = {kind: found.plain[size * i :][:size] for i, kind in enumerate(KINDS)}
    assert of["greedy"] != of["sampled"]
    most = [max(map(tokens.count, tokens)) for kind in ("greedy", "all penalties") for [(*_, tokens)] in of[kind][:1]]
    assert most[1] < most[0]  # penalized, a token is repeated less
    assert all(len(choice[3]) >= 16 for answer in of["min_tokens"] for choice in answer)
    assert all(choice[1].lstrip().startswith("{") for answer in of["schema"] for choice in answer)


@LONG
def test_its_greedy_tokens_are_those_of_the_engine_on_a_cpu_but_for_rounding(
    found: Found, eagle3: FrontedEngine
) -> None:
    parted = greedy_differences(PROMPTS, greedy_tokens(eagle3), found.greedy, "node", 1)
    assert [str(one) for one in parted if one.gap is None or one.gap > ROUNDING] == []
    assert len(parted) < len(PROMPTS)


@LONG
def test_ranks_that_share_attentions_input_answer_as_without(tmp_path: Path) -> None:
    """A prefill's padding rows hold NaN after attention; half of the prompts have an odd length."""
    settings = ("tp-size=2", "max-running-requests=8", "cuda-graph-bs-decode=[4]", "enable-torch-compile=false")
    asked = mixed([*QUESTIONS[:3], QUESTIONS[0][:-1]], ("greedy", "sampled"))

    def answers_with(switch: str) -> Answers:
        given = (*settings, f"enable-attn-tp-input-scattered={switch}", f"base-gpu-id={4 * (switch == 'true')}")
        with virtual_server(True, tmp_path / switch, *given, **NUMPY) as server:
            found = answers(server.address, [body | {"max_tokens": 12} for body in asked], 2)
        log = (tmp_path / switch / "server.log").read_text()
        assert ("each rank of 2 computes its share" in log) is (switch == "true")
        return found

    with ThreadPoolExecutor(2) as pool:
        alone, shared = pool.map(answers_with, ("false", "true"))
    assert alone == shared


@LONG
def test_a_step_that_does_not_wait_for_its_tensors_is_refused(tmp_path: Path) -> None:
    """No engine of this file can have a race: the first one ends its step."""
    planted = {"module": "support.planted_faults", "KIMI_PLANTED_WAIT": "1"}
    with (
        pytest.raises(KimiError, match="before it was ready"),
        virtual_server(False, tmp_path, "cuda-graph-bs-decode=[8]", "enable-torch-compile=false", **planted),
    ):
        pass
    assert re.search(r"RuntimeError: race: .* reads .*: nothing waits for it", (tmp_path / "server.log").read_text())


def test_it_answers_greedy_sampled_penalized_and_constrained_requests(tmp_path: Path) -> None:
    """A type that an operator refuses, a copy during a capture or a missing name would end the request or the start."""
    short = {"max_tokens": 8, "chat_template_kwargs": {"thinking": False}}
    asked = [body | short for body in mixed(QUESTIONS[:1], ("greedy", "top-p", "top-p", "frequency", "schema"))]
    # torch.compile, which four layouts have, would double the start.
    with virtual_server(True, tmp_path, "cuda-graph-bs-decode=[8]", "enable-torch-compile=false") as server:
        found = answers(server.address, asked, len(asked))
        info = info_of(server)
    assert (info["device"], info["attention_backend"], info["speculative_algorithm"]) == ("cuda", "aiter", "EAGLE3")
    assert found[1] == found[2]  # the same seed
    assert all(len(tokens) == 8 for [(*_, tokens)] in found[:4])
    assert found[4][0][1].startswith("{")

"""Dense products in FP8, served in all passes or in prefills: drafts change no token, and the logits stay near."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
from support.acceptance import accepted
from support.sglang_program import VERSIONS, environment
from support.tiny_servers import TWO_RANKS, running, tiny_launch

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.tokens import TokenClient

pytestmark = [pytest.mark.server, pytest.mark.slow]
QUESTIONS = [problem.question for problem in problems(12, seed=6)]
MODEL = "kimi-k2.5-tiny"


def answers(server: EngineServer) -> tuple[list[tuple[int, ...]], float]:
    """Return the tokens of all answers, and the accept length; 0 without drafts."""
    with EngineClient(*server.address) as client:
        found, acceptance = accepted(server.address, 4, partial(client.chat_all, QUESTIONS, 64, 10))
    return [answer.token_ids for answer in found], acceptance.length if acceptance else 0.0


def logprobs(server: EngineServer, answered: list[tuple[int, ...]]) -> list[float]:
    """Return the log probability of each token of these answers."""
    with TokenClient(*server.address) as probe:
        prompts = [probe.chat_ids(text, MODEL) for text in QUESTIONS]
        return [one for ids, tokens in zip(prompts, answered, strict=True) for one in probe.prefill(ids, tokens).chosen]


@pytest.mark.parametrize(
    "on", (("env.KIMI_DENSE_FP8=all",), ("env.KIMI_DENSE_FP8=prefill", *TWO_RANKS)), ids=("all", "prefill, TP 2")
)
@pytest.mark.parametrize("newest", (False, True), ids=VERSIONS)
def test_drafts_change_no_token_and_the_logits_stay_near(newest: bool, on: tuple[str, ...], tmp_path: Path) -> None:
    found, of_tokens, path = {}, {}, {"PYTHONPATH": environment(newest)["PYTHONPATH"]}
    for name, drafts, settings in (("bf16", False, on[1:]), ("plain", False, on), ("drafts", True, on)):
        launch = tiny_launch(drafts, settings)
        with running(replace(launch, env=launch.env | path).engine(tmp_path / f"{name}.log")) as server:
            found[name] = answers(server)
            of_tokens[name] = logprobs(server, found["bf16"][0])
            assert "kimi_missing_feature_info" not in read_once(*server.address).samples
        assert ("30 dense layers of each rank have" in (tmp_path / f"{name}.log").read_text()) is (name != "bf16")
    assert found["drafts"][0] == found["plain"][0] and all(found["plain"][0])
    assert found["drafts"][1] > 2.5
    apart = [abs(fp8 - bf16) for fp8, bf16 in zip(of_tokens["plain"], of_tokens["bf16"], strict=True)]
    assert 0 < mean(apart) < 0.01  # nats a token; 0.0014 on 2026-11-29

"""Checkpoints of `quantize`, served: FP8 draft, MXFP4 target. The tokens are those of the target alone."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.acceptance import accepted
from support.quantizing import quantized
from support.tiny_servers import running, started, tiny_launch

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_laptop import tiny

pytestmark = [pytest.mark.server, pytest.mark.slow]
QUESTIONS = [p.question for p in problems(12, seed=6)]
QUANTIZED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}  # all but fc and lm_head, merged as SGLang does


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("fp8")
    draft = quantized("fp8-draft", tiny.draft_path(), folder / "draft", "--vllm-exclude")
    yield from started(tiny_launch(settings=(f"draft.repo={draft}",)), folder)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    """The target in MXFP4, with its draft and alone."""
    folder = tmp_path_factory.mktemp("mxfp4")
    target = quantized("w4a8-target", tiny.target_bf16_path(), folder / "target", "--format", "mxfp4")
    launches = [tiny_launch(drafts, (f"model.repo={target}",)) for drafts in (True, False)]
    servers = [launch.server(folder / f"{number}.log") for number, launch in enumerate(launches)]
    with running(servers[0]), running(servers[1]):
        yield servers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The target without a draft."""
    yield from started(tiny_launch(speculate=False), tmp_path_factory.mktemp("alone"))


def ask(server: EngineServer) -> tuple[list[tuple[int, ...]], Acceptance | None]:
    with EngineClient(*server.address) as client:
        answers, found = accepted(server.address, 4, partial(client.chat_all, QUESTIONS, 64, 10))
    return [answer.token_ids for answer in answers], found


def test_an_fp8_draft_changes_no_token_of_the_target_and_drafts_are_accepted(
    fp8: EngineServer, alone: EngineServer, eagle3: FrontedEngine
) -> None:
    (expected, none), (_, bf16), (tokens, ours) = ask(alone), ask(eagle3), ask(fp8)
    assert tokens == expected and all(expected)
    assert none is None and bf16 is not None and ours is not None
    assert ours.length == pytest.approx(bf16.length, rel=0.1)


def test_mxfp4_changes_no_token_with_speculation_and_drafts_are_accepted(mxfp4: list[EngineServer]) -> None:
    (tokens, found), (expected, none) = map(ask, mxfp4)
    assert tokens == expected and all(expected)
    assert found is not None and found.length > 2.5 and none is None  # 3.3 on these problems, as with INT4


def test_its_layers_were_multiplied_in_fp8(fp8: EngineServer) -> None:
    log = Path(fp8.log_path).read_text(errors="replace")
    assert set(re.findall(r"(\w+): per-channel FP8 weights", log)) == QUANTIZED

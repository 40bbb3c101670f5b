"""The draft that `quantize fp8-draft` makes, served: the same tokens, an accept length like the BF16 draft's."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.quantizing import quantized
from support.tiny_servers import started, tiny_launch

from kimi_w4a8_eagle3 import tiny
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.metrics import Acceptance, acceptance_from_counters, scrape
from kimi_w4a8_eagle3.engine.process import EngineServer

pytestmark = pytest.mark.server
QUESTIONS = [p.question for p in tiny.problems("held_out", 20, seed=6)]
QUANTIZED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}  # all but fc and lm_head, merged as SGLang does


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("fp8")
    draft = quantized("fp8-draft", tiny.draft_path(), folder / "draft", "--vllm-exclude")
    yield from started(tiny_launch(settings=(f"draft.repo={draft}",)), folder)


def ask(server: EngineServer) -> tuple[list[tuple[int, ...]], Acceptance]:
    before = scrape(server.base_url)
    with EngineClient(server.base_url) as client:
        answers = client.chat_all(QUESTIONS, 64, 10)
    found = acceptance_from_counters(scrape(server.base_url).since(before), 4)
    assert found is not None
    return [answer.token_ids for answer in answers], found


def test_the_fp8_draft_changes_no_token_and_is_accepted(fp8: EngineServer, eagle3: EngineServer) -> None:
    expected, bf16 = ask(eagle3)
    tokens, ours = ask(fp8)
    assert tokens == expected and all(expected)
    assert ours.length == pytest.approx(bf16.length, rel=0.05)


def test_its_layers_were_multiplied_in_fp8(fp8: EngineServer) -> None:
    log = Path(fp8.log_path).read_text(errors="replace")
    assert set(re.findall(r"(\w+): FP8 weights by channel", log)) == QUANTIZED

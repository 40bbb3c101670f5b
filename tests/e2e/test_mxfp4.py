"""The built-in model in MXFP4, made by `quantize` and served: speculation changes no token, and drafts are accepted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.quantizing import quantized
from support.tiny_servers import started, tiny_launch

from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.base.counters import acceptance_from_counters, scrape
from kimi_w4a8_laptop import tiny
from proof.tiny.problems import problems

pytestmark = [pytest.mark.server, pytest.mark.slow]
QUESTIONS = [p.question for p in problems("held_out", 8, seed=6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "target"
    return quantized("w4a8-target", tiny.target_bf16_path(), folder, "--format", "mxfp4")


@pytest.fixture(scope="module")
def drafted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    yield from started(tiny_launch(settings=(f"model.repo={target}",)), tmp_path_factory.mktemp("drafted"))


@pytest.fixture(scope="module")
def alone(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    yield from started(tiny_launch(False, (f"model.repo={target}",)), tmp_path_factory.mktemp("alone"))


def test_speculation_changes_no_token_and_drafts_are_accepted(drafted: EngineServer, alone: EngineServer) -> None:
    answered, lengths = [], []
    for server in (drafted, alone):
        before = scrape(server.base_url)
        with EngineClient(server.base_url) as client:
            answered.append([answer.token_ids for answer in client.chat_all(QUESTIONS, 64, 8)])
        found = acceptance_from_counters(scrape(server.base_url).since(before), 4)
        lengths.append(found.length if found else 0.0)
    assert answered[0] == answered[1] and all(answered[1])
    assert lengths[0] > 2.5 and lengths[1] == 0  # 3.3 on these problems, as with INT4

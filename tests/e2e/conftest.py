"""Real SGLang servers of the built-in model, one of each kind for a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_w4a8_eagle3 import serving
from kimi_w4a8_eagle3.client import EngineClient
from kimi_w4a8_eagle3.recipes import Launch, load_recipe, render
from kimi_w4a8_eagle3.server import EngineServer, free_port

READY_S = 280.0


def tiny_launch(speculate: bool = True, settings: tuple[str, ...] = ()) -> Launch:
    recipe = load_recipe("tiny")
    if not speculate:
        recipe = recipe.without_speculation()
    return render(recipe, [f"port={free_port()}", *settings])


def started(launch: Launch, folder: Path) -> Iterator[EngineServer]:
    with serving.engine(launch, folder / "server.log") as server:
        server.wait_ready(READY_S)
        yield server


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    yield from started(tiny_launch(), tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    yield from started(tiny_launch(speculate=False), tmp_path_factory.mktemp("plain"))


@pytest.fixture
def client(eagle3: EngineServer) -> Iterator[EngineClient]:
    with EngineClient(eagle3.base_url) as made:
        yield made

"""Real SGLang servers of the built-in model, one of each kind for a module."""

from collections.abc import Iterator

import pytest
from support.tiny_servers import started, tiny_launch

from kimi_w4a8_eagle3.client import EngineClient
from kimi_w4a8_eagle3.server import EngineServer


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

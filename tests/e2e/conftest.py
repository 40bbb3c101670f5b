"""The second kind of server that only these tests need."""

from collections.abc import Iterator

import pytest
from support.tiny_servers import at_gpu, started, tiny_launch

from kimi_w4a8_eagle3.engine.fronted import FrontedEngine


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedEngine]:
    """The same model without speculation."""
    yield from started(tiny_launch(False, at_gpu(4)), tmp_path_factory.mktemp("plain"))

"""Hundreds of hostile requests at a real engine: nothing ends it, opens it, disturbs others or is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.extent import extent
from support.tiny_servers import tiny_launch, with_faults

from kimi_w4a8_eagle3.engine.process import EngineServer
from proof.fuzz.run import NO_KERNEL_CACHE, Fuzz, FuzzTarget

pytestmark = [pytest.mark.server, pytest.mark.slow]
BATCHES = extent(60, 600)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The built-in model's server that keeps no compiled matrix products, so that the memory of all else is seen."""
    launch = tiny_launch(settings=(NO_KERNEL_CACHE,))
    yield from with_faults(launch, "support.short_trials", tmp_path_factory.mktemp("engine"))


def test_known_attacks_and_batches_of_one_seed(engine: EngineServer, tmp_path: Path) -> None:
    target = FuzzTarget(engine.base_url, engine.pid, ended=lambda: engine.poll() is not None)
    fuzz = Fuzz(target, tmp_path, seed=1)
    assert fuzz.run(BATCHES) == []
    assert {"fields", "samples", "routes", "headers", "broken bodies"} < {group for group, _ in fuzz.statuses}
    assert fuzz.statuses.total() > 4 * BATCHES

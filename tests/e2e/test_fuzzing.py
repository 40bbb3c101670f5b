"""Hundreds of requests from one seed at a real engine: nothing ends it, opens it, disturbs others or is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.extent import extent
from support.tiny_servers import tiny_launch, with_faults

from kimi_w4a8_eagle3.engine.process import EngineServer
from proof.fuzz.resources import NO_KERNEL_CACHE
from proof.fuzz.session import Fuzz, FuzzTarget

pytestmark = [pytest.mark.server, pytest.mark.slow]

SEED = 1
REQUESTS = extent(400, 4000)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The built-in model's server that keeps no compiled matrix products, so that the memory of all else is seen."""
    launch = tiny_launch(settings=(NO_KERNEL_CACHE,))
    yield from with_faults(launch, "support.short_trials", tmp_path_factory.mktemp("engine"))


def test_the_requests_of_one_seed(engine: EngineServer, tmp_path: Path) -> None:
    target = FuzzTarget(engine.base_url, engine.pid, ended=lambda: engine.poll() is not None)
    outcome = Fuzz(target, tmp_path, SEED).run(REQUESTS)
    found = "\n\n".join(f"{fault.what} x{fault.times}: {fault}\n{fault.command}" for fault in outcome.faults.values())
    assert not found, f"seed {SEED}\n{found}"
    assert outcome.requests >= REQUESTS
    assert outcome.healthy_s

"""10,000 requests from one seed at a real engine: nothing ends it, opens it, disturbs others or is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.engine.process import EngineServer
from proof.fuzz.session import Fuzz, Target

pytestmark = pytest.mark.server

SEED = 1


@pytest.mark.timeout(900)
def test_ten_thousand_requests_of_one_seed(eagle3: EngineServer, tmp_path: Path) -> None:
    target = Target(eagle3.base_url, eagle3.pid, ended=lambda: eagle3.poll() is not None)
    outcome = Fuzz(target, tmp_path, SEED).run(10_000)
    found = "\n\n".join(f"{each.what} x{each.times}: {each}\n{each.command}" for each in outcome.faults.values())
    assert not found, f"seed {SEED}\n{found}"
    assert outcome.requests >= 10_000
    assert outcome.healthy_s

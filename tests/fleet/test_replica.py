"""A replica whose canary requests keep failing is ended, although its tokens move."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_servers import tiny_launch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fleet.replica import Replica
from kimi_w4a8_eagle3.ops.replica_state import Phase


def test_a_broken_engine_is_ended(tmp_path: Path) -> None:
    stopped: list[float] = []
    server = SimpleNamespace(pid=os.getpid(), folder=tmp_path, poll=lambda: None, stop=stopped.append)
    replica = Replica(tiny_launch(), tmp_path / "engine.log", lambda *_: None, "0", "tiny")
    replica.state.enter(Phase.CHECKING, "every sampled request fails")
    replica.state.broken = "every sampled request fails"
    with pytest.raises(KimiError, match="the engine is ended because every sampled request fails"):
        replica._watch(server)  # type: ignore[arg-type]
    assert stopped and replica.state.phase is Phase.STALLED


def test_an_end_without_drain_does_not_wait_for_sglang_to_look(tmp_path: Path) -> None:
    """SGLang looks for SIGTERM every 5 s, so Ctrl-C would take 7 to 10 s."""
    stopped: list[float] = []
    replica = Replica(tiny_launch(), tmp_path / "engine.log", lambda *_: None, "0", "tiny")
    replica._server = SimpleNamespace(stop=stopped.append)  # type: ignore[assignment]
    replica.end_now()
    assert stopped == [0.5]

"""A replica whose canary requests keep failing is ended, although its tokens move; a lost one is shown for a while."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_servers import tiny_launch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fleet import route
from kimi_w4a8_eagle3.fleet.replica import Replica
from kimi_w4a8_eagle3.fleet.router import RouterEndpoint
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


def test_a_router_forgets_a_replica_that_is_gone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that ends comes back at another address, so a router would show more and more of them."""
    urls = {"http://a:1", "http://b:1"}
    registrar = SimpleNamespace(registered=lambda: frozenset(urls))
    view = route.router_view(SimpleNamespace(registrar=registrar, endpoint=RouterEndpoint("127.0.0.1", 1)))  # type: ignore[arg-type]

    def shown() -> dict[str, Phase]:
        return {state.name: state.phase for state in view.replicas()}

    assert shown() == {"a:1": Phase.READY, "b:1": Phase.READY}
    urls.remove("http://b:1")
    assert shown() == {"a:1": Phase.READY, "b:1": Phase.DOWN}
    monkeypatch.setattr(route, "_LOST_S", 0.0)
    assert shown() == {"a:1": Phase.READY}
    urls.add("http://b:1")
    assert shown() == {"a:1": Phase.READY, "b:1": Phase.READY}

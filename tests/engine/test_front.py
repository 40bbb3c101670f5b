"""The gateway's processes under their supervisor: what a crash leaves, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import httpx
import psutil
import pytest
from support.loopback import answering
from support.tiny_servers import tiny_launch
from support.waiting import gone, until

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine import front as module
from kimi_w4a8_eagle3.engine.front import Front
from kimi_w4a8_eagle3.gateway.config import GatewayConfig
from kimi_w4a8_eagle3.ops.state import EngineState, Phase


def answers(front: Front) -> bool:
    try:
        return httpx.get(f"{front.base_url}/", timeout=60).status_code == 200
    except httpx.TransportError:
        front.require_running()
        return False


@pytest.mark.slow
def test_what_a_killed_gateway_leaves_does_not_keep_the_next_from_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's workers outlive its supervisor, and hold the listening socket."""
    monkeypatch.setattr(module, "_BRIEF_S", 0.0)
    config = tiny_launch().gateway
    with Front(GatewayConfig(config.checkpoint, config.model, port=config.port, workers=2), tmp_path / "log") as front:
        until(lambda: answers(front))
        assert front.pid is not None
        first = psutil.Process(front.pid)
        family = [first, *first.children(recursive=True)]
        assert len(family) >= 3
        first.kill()
        first.wait()
        front.restart_if_ended()
        assert gone(*family) and front.pid != first.pid
        until(lambda: answers(front))
        second = [psutil.Process(front.pid), *psutil.Process(front.pid).children(recursive=True)]
    assert gone(*second)


@pytest.mark.parametrize(("workers", "keys"), [(1, "no such file"), (2, "no such file"), (1, ""), (2, "")])
def test_a_gateway_that_cannot_serve_is_one_message(
    workers: int, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BRIEF_S", 0.0)  # however late it ends
    key_file = str(tmp_path / keys) if keys else ""
    config = GatewayConfig(str(tmp_path), "m", port=tiny_launch().port, workers=workers, key_file=key_file)
    with Front(config, tmp_path / "log") as front:
        with pytest.raises(KimiError, match="the gateway ended with exit code 2"):
            front.wait_ready()
        with pytest.raises(KimiError, match=keys or "tokenizer"):
            front.restart_if_ended()


def test_a_gateway_that_refuses_all_along_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SERVE_S", 0.3)
    monkeypatch.setattr(Front, "require_running", lambda _: None)
    with answering(lambda *_: (503, b"the engine lacks arguments")) as url:
        front = Front(GatewayConfig("", "m", port=int(url.rpartition(":")[2])), tmp_path / "log")
        with pytest.raises(KimiError, match=r"not ready within 0 s \(HTTP 503: the engine lacks arguments\)"):
            front.wait_ready()
    front.__exit__()


def test_a_full_disk_changes_no_phase_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(GatewayConfig("", "m"), tmp_path / "log", tmp_path / "engine.json")
    state = EngineState("tiny", "http://127.0.0.1:1", 60.0, told=lambda phase: front.tell(phase.value))
    state.enter(Phase.READY)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, "write_private", full)
    state.enter(Phase.STALLED, "its scheduler is silent")
    assert state.phase is Phase.STALLED and '"ready"' in (tmp_path / "engine.json").read_text()
    front.__exit__()

"""The supervisor: an engine that ends or is broken starts again, with pauses; one that never served is given up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny_servers import tiny_launch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.ops.state import Phase
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_eagle3.supervision import supervisor as module
from kimi_w4a8_eagle3.supervision.checks import ChangedWeights, checked, fingerprint, require_unchanged
from kimi_w4a8_eagle3.supervision.supervisor import MAX_FAILURES, Stalled, Supervisor
from kimi_w4a8_laptop import tiny


class Told:
    """A gateway that remembers what it was told, and in which order it and the engine were stopped."""

    def __init__(self) -> None:
        self.phases, self.stopped = list[str](), list[tuple[str, float]]()

    def tell(self, phase: str, *_: str) -> None:
        self.phases.append(phase)

    def stop(self, grace_s: float) -> bool:
        self.stopped.append(("gateway", grace_s))
        return True


def supervised(tmp_path: Path, front: Told | None = None, launch: Launch | None = None) -> Supervisor:
    return Supervisor(launch or tiny_launch(), front or Told(), tmp_path / "engine.log", lambda *_: None)  # type: ignore[arg-type]


class Scripted(Supervisor):
    """A supervisor whose engine does what a script says: serve and fail, fail at the start, or end as asked."""

    def __init__(self, tmp_path: Path, script: Iterable[str]) -> None:
        self.said: list[tuple[str, str]] = []
        said = self.said.append
        super().__init__(tiny_launch(), Told(), tmp_path / "log", lambda _, event, why: said((event, why)))  # type: ignore[arg-type]
        self._script = iter(script)
        self.pauses: list[float] = []
        self._ending = SimpleNamespace(is_set=lambda: self.ended, wait=self.pauses.append)  # type: ignore[assignment]
        self.ended = False

    def run(self) -> None:
        step = next(self._script)
        self._was_ready = step.startswith("serve")
        if step.endswith("ends"):
            raise KimiError("the engine ended by itself")
        if step.endswith("changed"):
            raise ChangedWeights("weights on the disk changed")
        if step.endswith("stalls"):
            raise Stalled("no token")
        if step.endswith("bug"):
            raise ValueError("a bug of ours")
        self.ended = True


def test_an_engine_that_served_starts_again_at_once_and_then_after_pauses(tmp_path: Path) -> None:
    steps = ["serve, ends", "ends", "ends", "stalls", "serve, bug", "serve, stop"]
    supervisor = Scripted(tmp_path, steps)
    supervisor.keep()
    assert supervisor.pauses == [0, 1, 2, 4, 0]
    assert supervisor.state.restarts == {"ended": 3, "stalled": 1, "error": 1, "renewed": 0}
    assert ("down", "ValueError: a bug of ours") in supervisor.said


@pytest.mark.parametrize(("steps", "starts"), [(["ends"] * 9, 1), (["serve, ends"] + ["ends"] * 19, MAX_FAILURES)])
def test_an_engine_that_does_not_start_is_given_up(tmp_path: Path, steps: list[str], starts: int) -> None:
    supervisor = Scripted(tmp_path, steps)
    with pytest.raises(KimiError, match="ended by itself"):
        supervisor.keep()
    assert len(list(supervisor._script)) == len(steps) - starts
    assert supervisor.said[-1][0] == "gave-up"
    assert starts == 1 or sum(supervisor.pauses) > 600  # a fault of some minutes must not cost the service


def test_an_engine_is_not_started_again_with_weights_that_changed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.target_path(), tmp_path / "model"))
    launch = checked(render(load_recipe("tiny:plain"), [f"model.repo={folder}", "model.revision=main"]))
    supervisor = supervised(tmp_path, launch=launch)
    require_unchanged(launch, supervisor._files)
    shard = sorted(folder.glob("*.safetensors"))[0]
    before, content = shard.stat(), shard.read_bytes()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(KimiError, match="weights on the disk changed"):
        require_unchanged(launch, supervisor._files)
    shard.write_bytes(content[:8] + content[8:].replace(b"weight", b"weihgt", 1))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(KimiError):
        require_unchanged(launch, supervisor._files)
    supervisor._restarts = True
    with pytest.raises(KimiError):
        supervisor.run()
    assert supervisor.state.phase is Phase.DOWN and supervisor._server is None
    supervisor._refuses, supervisor._preflight = True, False
    supervisor.renew()  # SIGHUP: the operator takes the files of now
    require_unchanged(supervisor.launch, supervisor._files, preflight=False)


def test_changed_weights_are_waited_for_and_never_left_to_another_process(tmp_path: Path) -> None:
    supervisor = Scripted(tmp_path, ["serve, ends"] + ["changed"] * (MAX_FAILURES + 5) + ["serve, stop"])
    supervisor.keep()
    assert supervisor.pauses[-1] == 300 and "gave-up" not in dict(supervisor.said)


def test_a_restart_keeps_the_openings_of_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, first = supervised(tmp_path), ((1, 2, 3, 4),) * 4
    monkeypatch.setattr(module, "require_private", lambda url: None)
    monkeypatch.setattr(module, "EngineClient", lambda *_: nullcontext())
    monkeypatch.setattr(module, "answers_file", lambda launch: None)
    answers = [SimpleNamespace(token_ids=(9, 8, 7, 6))] * 4
    monkeypatch.setattr(module.startup_check, "require_answers", lambda client, groups: answers)
    supervisor.state.openings = first
    with pytest.raises(KimiError, match="do not begin like the recorded ones"):
        supervisor._check()
    assert supervisor.state.openings == first


def test_a_detokenizer_that_returns_nothing_takes_the_engine_out_of_ready_until_it_does(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path)
    supervisor.state.enter(Phase.READY)
    limit = module._QUEUE_SILENT_S
    assert limit + 2 * module._POLL_S < 15  # as the runbook says: the signs are of the same second, and one round late
    supervisor._follow(0.0, 0.0, limit - 0.1, None)
    assert supervisor.state.ready
    supervisor._follow(0.0, 0.0, limit, None)
    assert supervisor.state.phase is Phase.STALLED and "its detokenizer has returned nothing" in supervisor.state.reason
    supervisor._follow(0.0, 0.0, 0.0, None)
    assert supervisor.state.ready


def test_a_broken_engine_is_ended(tmp_path: Path) -> None:
    stopped: list[float] = []
    server = SimpleNamespace(
        pid=os.getpid(), folder=tmp_path, secret="a secret", poll=lambda: None, stop=stopped.append
    )
    supervisor = supervised(tmp_path)
    supervisor.state.enter(Phase.CHECKING, "every sampled request fails")
    supervisor.state.broken = "every sampled request fails"
    with pytest.raises(KimiError, match="the engine is ended because every sampled request fails"):
        supervisor._watch(server)  # type: ignore[arg-type]
    assert stopped and supervisor.state.phase is Phase.STALLED


def test_an_end_without_drain_does_not_wait_for_sglang_to_look(tmp_path: Path) -> None:
    """SGLang looks for SIGTERM every 5 s, so Ctrl-C would take 7 to 10 s."""
    stopped, front = list[float](), Told()
    supervisor = supervised(tmp_path, front)
    supervisor._server = SimpleNamespace(stop=stopped.append)  # type: ignore[assignment]
    supervisor.end_now()
    assert stopped == [0.5] and front.stopped == [("gateway", 0.5)]


@pytest.mark.parametrize("ends", [True, False])
def test_a_drain_gives_notice_and_ends_the_gateway_before_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A renewal leaves the gateway, which then says that the engine is away."""
    monkeypatch.setattr(module, "NOTICE_S", 0.5)
    front, polls = Told(), list[list[str]]()
    supervisor = supervised(tmp_path, front)
    supervisor.state.enter(Phase.READY)
    if ends:
        supervisor._ending.set()

    def stop(grace_s: float) -> bool:
        front.stopped.append(("engine", round(grace_s)))
        return True

    server = SimpleNamespace(poll=lambda: polls.append(list(front.phases)), stop=stop)
    supervisor._drain(server)  # type: ignore[arg-type]
    assert len(polls) >= 2 and polls[0] == ["ready", "draining"]
    assert front.stopped == [("gateway", 120.0)] * ends + [("engine", 120)]


def test_a_renewal_serves_the_draft_that_is_there_now_or_changes_nothing(tmp_path: Path) -> None:
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "draft"
    for folder in (first, second):
        shutil.copytree(tiny.draft_path(), folder)
    (second / "note.json").write_text("{}")
    link.symlink_to(first)
    said: list[str] = []
    launch = checked(render(load_recipe("tiny"), [f"draft.repo={link}"]))
    supervisor = Supervisor(
        launch,
        Told(),
        tmp_path / "log",
        lambda _, event, reason: said.append(f"{event}: {reason}"),  # type: ignore[arg-type]
    )
    link.unlink()
    link.symlink_to(second)
    supervisor.renew()
    assert said[-1] == "renewal: given up: the engine is starting" and supervisor.launch is launch
    supervisor._was_ready = True
    supervisor.state.enter(Phase.CHECKING, "the new draft accepts nothing")
    (second / "config.json").write_text("{")
    supervisor.renew()
    assert said[-1].startswith("renewal: given up: ") and "where:" in said[-1] and supervisor.launch is launch
    shutil.copy(first / "config.json", second)
    supervisor.renew()
    assert supervisor._end_requested.is_set() and supervisor.state.restarts["renewed"] == 1
    assert supervisor.launch.args["weight-version"] == fingerprint(tiny.target_path(), second)

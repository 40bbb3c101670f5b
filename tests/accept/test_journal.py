"""The stages' runner: goes on after a kill, stops at a failure with its remedy, and trusts no other version."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.accept import journal
from kimi_w4a8_eagle3.accept.journal import Figure, Journal, Stage, open_journal, run_stages
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.signals import Terminated

FIGURE = Figure(name="speed", value=5.1, unit="TB/s", predicted=6.0)
KILLED = """
import os, sys
from pathlib import Path
from kimi_w4a8_eagle3.accept.journal import Stage, open_journal, run_stages
folder, found = open_journal(Path(sys.argv[1]), "all", restart=False)
stages = [Stage("first", "", lambda: ("done", [])), Stage("second", "", lambda: os.kill(os.getpid(), 9))]
run_stages(stages, found, folder, print)
"""


def run(stages: list[Stage], runs: Path, restart: bool = False, sizes: str = "all") -> tuple[Path, Journal, list[str]]:
    said: list[str] = []
    folder, found = open_journal(runs, sizes, restart)
    run_stages(stages, found, folder, said.append)
    return folder, found, said


def passing(name: str, ran: list[str]) -> Stage:
    def go() -> tuple[str, list[Figure]]:
        ran.append(name)
        return f"{name} is well", [FIGURE]

    return Stage(name, "", go)


def failing(name: str, error: Exception) -> Stage:
    def go() -> tuple[str, list[Figure]]:
        raise error

    return Stage(name, "", go)


def test_a_killed_run_goes_on_after_the_last_stage_that_passed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ran: list[str] = []
    _, found, said = run([passing("first", ran), passing("second", ran)], tmp_path)
    assert ran == ["second"] and said == ["[1/2] first: passed before", "[2/2] second"]
    assert {name: outcome.state for name, outcome in found.outcomes.items()} == {"first": "passed", "second": "passed"}
    assert found.outcomes["second"].figures == [FIGURE]
    assert len(list(tmp_path.iterdir())) == 1


def test_it_stops_at_the_first_failure_and_says_what_to_do(tmp_path: Path) -> None:
    ran: list[str] = []
    bad = failing("bad", KimiError("port 9527 is taken", remedy="stop the other server"))
    stages = [passing("good", ran), bad, passing("later", ran)]
    with pytest.raises(KimiError, match="bad failed: port 9527 is taken") as caught:
        run(stages, tmp_path)
    assert caught.value.remedy == "stop the other server; then repeat the command to resume with this stage"
    assert caught.value.exit_code == 1 and ran == ["good"]
    outcomes = open_journal(tmp_path, "all", restart=False)[1].outcomes
    assert outcomes["bad"].state == "failed" and "stop the other server" in outcomes["bad"].found
    assert "later" not in outcomes
    run([passing(stage.name, ran) for stage in stages], tmp_path)
    assert ran == ["good", "bad", "later"]


def test_what_nobody_foresaw_fails_the_stage_as_well(tmp_path: Path) -> None:
    with pytest.raises(KimiError, match="odd failed: ZeroDivisionError: division"):
        run([failing("odd", ZeroDivisionError("division"))], tmp_path)
    folder, found = open_journal(tmp_path, "all", restart=False)
    assert found.outcomes["odd"].state == "failed" and "in go" in (folder / "traceback.txt").read_text()


def test_a_signal_is_no_failure_of_the_stage(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(Terminated):
        run([passing("one", ran), failing("two", Terminated(signal.SIGTERM))], tmp_path)
    assert list(open_journal(tmp_path, "all", restart=False)[1].outcomes) == ["one"]


def test_a_stage_that_is_missing_here_runs_once_it_is_there(tmp_path: Path) -> None:
    ran: list[str] = []
    run([Stage("gpu", "", lambda: ("", []), "needs a gfx942 GPU"), passing("cpu", ran)], tmp_path)
    outcome = open_journal(tmp_path, "all", restart=False)[1].outcomes["gpu"]
    assert (outcome.state, outcome.found) == ("not run", "needs a gfx942 GPU")
    run([passing("gpu", ran), passing("cpu", ran)], tmp_path)
    assert ran == ["cpu", "gpu"]


def test_results_of_other_versions_or_sizes_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    first, *_ = run([passing("one", ran)], tmp_path)
    with pytest.raises(KimiError, match="sizes is few, was all"):
        run([passing("one", ran)], tmp_path, sizes="few")
    monkeypatch.setattr(journal, "installed_versions", lambda: {"sglang": "9.9"})
    with pytest.raises(KimiError, match=r"sglang is 9\.9, was ") as caught:
        run([passing("one", ran)], tmp_path)
    assert "--restart" in caught.value.remedy
    second, *_ = run([passing("one", ran)], tmp_path, restart=True)
    assert ran == ["one", "one"] and first.is_dir() and second != first
    assert open_journal(tmp_path, "all", restart=False)[0] == second


def test_a_journal_that_is_no_journal_is_one_message(tmp_path: Path) -> None:
    folder, *_ = run([], tmp_path)
    (folder / journal.JOURNAL).write_text('{"identity": {}, "outcomes": {"x": {"state": "splendid", "found": ""}}}')
    with pytest.raises(KimiError, match="cannot read the journal") as caught:
        open_journal(tmp_path, "all", restart=False)
    assert "--restart" in caught.value.remedy

"""The stages' runner: goes on after a kill and after a failure, and trusts no other version."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.supervision.serve import Terminated
from kimi_w4a8_lab.accept import journal
from kimi_w4a8_lab.accept.claims import page
from kimi_w4a8_lab.accept.journal import AcceptResult, Figure, Skipped, Stage, StageResult, open_run, run_stages
from kimi_w4a8_lab.base.run_folder import RESULT
from kimi_w4a8_lab.base.verdict import Verdict

FIGURE = Figure(name="speed", value=5.1, unit="TB/s", predicted=6.0)
KILLED = """
import os, sys
from pathlib import Path
from kimi_w4a8_lab.accept.journal import Stage, StageResult, open_run, run_stages
kept = open_run(Path(sys.argv[1]), {"sizes": "all"}, restart=False)
stages = [Stage("first", "", lambda: StageResult("done")), Stage("second", "", lambda: os.kill(os.getpid(), 9))]
run_stages(stages, kept, print)
"""


def run(
    stages: list[Stage], runs: Path, restart: bool = False, sizes: str = "all"
) -> tuple[Path, AcceptResult, list[str]]:
    said: list[str] = []
    kept = open_run(runs, {"sizes": sizes}, restart)
    run_stages(stages, kept, said.append)
    return kept.folder, kept.result, said


def stored(runs: Path) -> AcceptResult:
    return open_run(runs, {"sizes": "all"}, restart=False).result


def passing(name: str, ran: list[str]) -> Stage:
    def go() -> StageResult:
        ran.append(name)
        return StageResult(f"{name} is well", figures=[FIGURE])

    return Stage(name, "", go)


def failing(name: str, error: Exception) -> Stage:
    def go() -> StageResult:
        raise error

    return Stage(name, "", go)


def test_a_killed_run_goes_on_after_the_last_stage_that_passed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ran: list[str] = []
    _, found, said = run([passing("first", ran), passing("second", ran)], tmp_path)
    assert ran == ["second"] and said[0] == "first: passed before" and said[3].startswith("[1/1] second (0 min so far")
    assert found.names(Verdict.PASS) == ["first", "second"]
    assert found.stages["second"].figures == [FIGURE]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_is_recorded_and_the_other_stages_go_on(tmp_path: Path) -> None:
    ran, said = list[str](), list[str]()
    bad = failing("bad", KimiError("port 9527 is taken", remedy="stop the other server"))
    after = failing("after", Skipped("the engine did not start"))
    stages = [passing("good", ran), bad, after, passing("later", ran), failing("odd", ZeroDivisionError("division"))]
    stages[0] = replace(stages[0], minutes=20)
    kept = open_run(tmp_path, {"sizes": "all"}, restart=False)
    with pytest.raises(KimiError, match="bad: port 9527 is taken; 2 of 5 stages passed, 2 failed") as caught:
        run_stages(stages, kept, said.append)
    assert said[:2] == ["timetable: about 20 min", "    20 min  good"]
    assert said[6] == "[1/5] good (0 min so far, about 20 to go)"
    assert "in go" in (kept.folder / "traceback.txt").read_text()
    assert caught.value.exit_code == 1 and ran == ["good", "later"]
    found = stored(tmp_path)
    assert (found.names(Verdict.FAIL), found.names(Verdict.NOT_RUN)) == (["bad", "odd"], ["after"])
    assert "stop the other server" in found.stages["bad"].found
    assert found.headline == "NOT ACCEPTED: bad: port 9527 is taken; 2 of 5 stages passed, 2 failed, 1 not run"
    mended = [passing(stage.name, ran) for stage in stages]
    _, found, _ = run(mended, tmp_path)
    assert ran == ["good", "later", "bad", "after", "odd"]
    assert found.headline == "ACCEPTED: 5 of 5 stages passed"


@pytest.mark.parametrize(
    ("verdicts", "headline"),
    [
        (["pass", "inconclusive", "measured", "pass"], "ACCEPTED: 2 of 4 stages passed, 1 inconclusive, 1 not judged"),
        (["pass", "slow", "measured"], "NOT ACCEPTED: 1: slow it is; 1 of 3 stages passed, 1 slow, 1 not judged"),
        (
            ["measured", "inconclusive"],
            "NOT FINISHED: 0: measured it is; 0 of 2 stages passed, 1 inconclusive, 1 not judged",
        ),
    ],
)
def test_only_a_stage_that_passed_counts_as_passed(verdicts: list[str], headline: str, tmp_path: Path) -> None:
    ran: list[str] = []

    def go(name: str, verdict: str) -> StageResult:
        ran.append(name)
        return StageResult(f"{verdict} it is", Verdict(verdict))

    stages = [Stage(str(at), "", partial(go, str(at), verdict)) for at, verdict in enumerate(verdicts)]
    accepted = headline.startswith("ACCEPTED")
    with nullcontext() if accepted else pytest.raises(KimiError, match=headline):
        run(stages, tmp_path)
    kept = open_run(tmp_path, {"sizes": "all"}, restart=False)
    assert (kept.result.headline, kept.result.accepted) == (headline, accepted)
    with nullcontext() if accepted else pytest.raises(KimiError):
        run_stages(stages, kept, print)
    assert ran[len(stages) :] == [str(at) for at, verdict in enumerate(verdicts) if verdict == "slow"]


def test_a_signal_is_no_failure_of_the_stage(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(Terminated):
        run([passing("one", ran), failing("two", Terminated(signal.SIGTERM))], tmp_path)
    found = stored(tmp_path)
    assert (found.names(Verdict.PASS), found.names(Verdict.NOT_RUN)) == (["one"], ["two"])
    assert found.headline == "NOT FINISHED: two: not reached; 1 of 2 stages passed, 1 not run"


def test_a_stage_that_no_recipe_needs_may_be_missing_and_runs_once_it_is_there(tmp_path: Path) -> None:
    ran: list[str] = []
    extra = Stage("gpu", "", lambda: StageResult(""), "needs a gfx942 GPU", required=False)
    run([extra, passing("cpu", ran)], tmp_path)
    found = stored(tmp_path)
    assert found.headline == "ACCEPTED: 1 of 2 stages passed, 1 not run"
    assert (found.stages["gpu"].verdict, found.stages["gpu"].found) == (Verdict.NOT_RUN, "needs a gfx942 GPU")
    run([passing("gpu", ran), passing("cpu", ran)], tmp_path)
    assert ran == ["cpu", "gpu"]


def test_a_stage_that_the_recipe_needs_and_the_machine_lacks_refuses(tmp_path: Path) -> None:
    lacking = [Stage(f"agent: {name}", "", lambda: StageResult(""), "7 GPUs, needs 8") for name in ("start", "smoke")]
    headline = "NOT ACCEPTED: agent: start: 7 GPUs, needs 8; 1 of 3 stages passed, 2 not run"
    with pytest.raises(KimiError, match=headline):
        run([passing("doctor", []), *lacking], tmp_path)
    found = stored(tmp_path)
    assert found.refused and found.headline == headline and page(found).tone == "worse"


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
    assert open_run(tmp_path, {"sizes": "all"}, restart=False).folder == second


@pytest.mark.parametrize(
    ("content", "what"), [('{"kind": "accept", "identity"', "EOF"), ('{"kind": "bench"}', "kind: Input should be")]
)
def test_a_damaged_run_is_one_message(tmp_path: Path, content: str, what: str) -> None:
    folder, *_ = run([passing("one", [])], tmp_path)
    (folder / RESULT).write_text(content)
    with pytest.raises(KimiError, match=f"result.json cannot be read: .*{what}") as caught:
        open_run(tmp_path, {"sizes": "all"}, restart=False)
    assert "--restart" in caught.value.remedy

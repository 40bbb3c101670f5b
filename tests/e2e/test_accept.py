"""`kimi-w4a8 accept` on a CPU, from the command line to the bundle: what can run here passes, and runs once."""

from __future__ import annotations

import re
import socket
import tarfile
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_lab.accept import stages
from kimi_w4a8_lab.accept.journal import DONE, AcceptResult
from kimi_w4a8_lab.base.run_folder import RunFolder
from kimi_w4a8_lab.base.verdict import Verdict

pytestmark = [pytest.mark.server, pytest.mark.slow]
ALL_HERE = [f"tiny: {name}" for name in ("start", "smoke", "tools", "streams", "tiny-con2", "accuracy", "lossless")]


def test_a_taken_port_fails_one_stage_and_the_same_command_runs_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each text that is measured costs two more programs that import SGLang.
    monkeypatch.setattr(stages, "SPEED", {False: ("tiny-con2",), True: ("con2", "con40", "chat")})
    sizes = stages.Sizes(smoke=4, prompts=2, problems=4, lossless=2, samples=0, tools=2)
    monkeypatch.setattr(stages, "QUICK", sizes)
    monkeypatch.setattr(stages, "_STREAMED", 6)  # prompts, of which one is maths, is streamed and asked whole
    # The same calls in every run: drawn ones differ, and some are cut.
    greedy = partial(stages.tool_run.ToolPlan, max_tokens=128, extra={"temperature": 0})
    monkeypatch.setattr(stages.tool_run, "ToolPlan", greedy)
    command = ["accept", "--quick", "--full", "--recipe", "tiny", "--runs", str(tmp_path)]

    with socket.create_server(("127.0.0.1", int(str(load_recipe("tiny").args["port"])))):
        first = CliRunner().invoke(app, command)
    assert isinstance(first.exception, KimiError) and first.exception.exit_code == 1
    assert first.exception.what.startswith("NOT ACCEPTED: doctor: tiny: port: "), first.output
    assert "timetable" in first.output and "min so far, about" in first.output
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    found = RunFolder.open(folder, AcceptResult).result
    assert (found.names(Verdict.FAIL), found.names(*DONE)) == (["doctor"], ALL_HERE), first.output
    assert found.stages["tiny: tiny-con2"].verdict is Verdict.MEASURED
    assert found.stages["kernels flydsl, TP 8"].found == "needs a gfx942 GPU"
    assert "TPOT" in found.stages["tiny: tiny-con2"].found
    accept_length = found.stages["tiny: tiny-con2"].figures[-1]
    assert accept_length.name.startswith("accept length") and 1 <= accept_length.value <= 4
    solved = {figure.name: figure.value for figure in found.stages["tiny: accuracy"].figures}
    assert solved["strict-match"] >= 50
    assert '<h1 class="worse">NOT ACCEPTED: ' in (folder / "report.html").read_text()

    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and again.output.count(" before\n") == len(ALL_HERE), again.output
    page = (folder / "report.html").read_text()
    assert "quick run with --full of tiny (builtin:" in page and "not judged: this machine has " in page
    claims = page.partition("What this run leaves open")[2]
    cells = re.findall(r'<td data-label="now"[^>]*>([^<]*)', claims)
    assert len(cells) > 10 and set(cells) == {"not run"}  # a CPU proves nothing of it
    with tarfile.open(f"{folder}.tar.gz") as bundle:
        kept = {name.partition("/")[2] for name in bundle.getnames()}
    assert {"report.html", "result.json", "run.json", "engine-tiny.log", "doctor-tiny.json"} <= kept

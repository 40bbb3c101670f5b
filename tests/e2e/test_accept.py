"""`kimi-w4a8 accept` on a CPU, from the command line to the bundle: what can run here passes, and runs once."""

from __future__ import annotations

import re
import socket
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.accept import stages
from kimi_w4a8_eagle3.accept.journal import Journal
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.recipe.launch import load_recipe

pytestmark = pytest.mark.server
ALL_HERE = ["doctor", "tiny: smoke", "tiny: tiny-con2", "tiny: accuracy", "tiny: lossless"]


def test_a_taken_port_stops_it_and_the_same_command_goes_on_to_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each text that is measured costs two more programs that import SGLang.
    monkeypatch.setattr(stages, "SPEED", {False: ("tiny-con2",), True: ("con2", "con40", "chat")})
    monkeypatch.setattr(stages, "QUICK", stages.Sizes(smoke=4, prompts=2, problems=4, lossless=2, samples=0))
    command = ["accept", "--quick", "--recipe", "tiny", "--recipe", "eagle3", "--runs", str(tmp_path)]

    with socket.create_server(("127.0.0.1", int(str(load_recipe("tiny").args["port"])))):
        stopped = CliRunner().invoke(app, command)
    assert isinstance(stopped.exception, KimiError) and stopped.exception.exit_code == 1
    assert "doctor failed: port" in stopped.exception.what and "resume with this stage" in stopped.exception.remedy
    assert "report.html" in stopped.output

    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    outcomes = Journal.model_validate_json((folder / "journal.json").read_text()).outcomes
    assert [name for name, outcome in outcomes.items() if outcome.state == "passed"] == ALL_HERE
    assert outcomes["kernels flydsl, TP 8"].found == "needs a gfx942 GPU"
    assert "needs 8" in outcomes["eagle3: con40"].found
    figures = {figure.name: figure for name in ALL_HERE for figure in outcomes[name].figures}
    accept_length = next(figure for name, figure in figures.items() if name.startswith("tiny tiny-con2 accept length"))
    assert 1 <= accept_length.value <= 4 and figures["tiny tiny-math strict-match, share solved"].value >= 0.5

    page = (folder / "report.html").read_text()
    assert page.count("<b class=") == len(re.findall(r'<b class="soft">not run', page)) > 10  # proved on a CPU: nothing
    with tarfile.open(f"{folder}.tar.gz") as bundle:
        kept = {name.partition("/")[2] for name in bundle.getnames()}
    assert {"report.html", "journal.json", "run.json", "engine-tiny.log", "doctor-tiny.json"} <= kept

    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and again.output.count("passed before") == len(ALL_HERE)

"""Claims of docs/verified.md, the stages that settle them, and the page of a run."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.doctor.probe import Probe
from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_lab.accept.claims import CLAIMS, page, settled, write_bundle
from kimi_w4a8_lab.accept.journal import AcceptResult, Figure, Stage, StageResult
from kimi_w4a8_lab.accept.stages import FIRST, IMAGE, LOAD_MINUTES, ON_GPUS, AcceptRun, Sizes
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_lab.report.page import write_page
from kimi_w4a8_lab.speed.texts import Texts

MI325X = Machine((Device("gfx942", 304, "0000:01:00.0", 0, 256 << 30),) * 8)
PASSED = StageResult("well", figures=[Figure("TPOT median", 27.4, "ms", published=27.41)])
FAILED = StageResult("<b>a GPU fell off", Verdict.FAIL)
MISSING = StageResult("needs a gfx942 GPU", Verdict.NOT_RUN)


def stages(machine: Machine, *recipes: str, full: bool = True) -> list[Stage]:
    sizes = Sizes(full=full)
    return AcceptRun(Path(), recipes, sizes, Console(quiet=True), Texts(), machine=machine).stages()


def ended(here: list[Stage], changes: dict[str, StageResult]) -> dict[str, StageResult]:
    """The results of stages that passed, but for some."""
    found = {stage.name: (stage.proves, changes.get(stage.name, PASSED)) for stage in here}
    return {name: replace(result, proves=proves) for name, (proves, result) in found.items()}


def test_the_open_claims_are_those_of_the_docs() -> None:
    rows = [line.strip("| \n").split(" | ") for line in (ROOT / "docs/verified.md").read_text().splitlines()]
    open_rows = [(cells[0], cells[2]) for cells in rows[7:] if len(cells) == 3 and cells[2]]
    assert [(claim.what, claim.left_open) for claim in CLAIMS] == open_rows


def test_every_claim_has_stages_of_the_mi325x_recipes_or_a_reason_why_not() -> None:
    proves = {stage.proves for stage in stages(MI325X, *ON_GPUS)} - {""}
    assert {key for claim in CLAIMS for key in claim.settled_by} == proves
    assert [claim.what for claim in CLAIMS if bool(claim.settled_by) == bool(claim.otherwise)] == []


def test_the_first_hour_is_an_hour_with_loads_of_twenty_minutes_and_begins_with_the_agents() -> None:
    hour = stages(MI325X, FIRST, full=False)
    assert LOAD_MINUTES == 20 and sum(stage.minutes for stage in hour) <= 60
    assert [stage.name for stage in hour if stage.minutes >= LOAD_MINUTES] == ["agent: start", "agent: lossless"]
    names = [stage.name.partition(": ")[2] for stage in hour[1:]]
    assert names == ["start", "smoke", "tools", "streams", "con2", "con40", "lossless"]
    assert not [stage.name for stage in hour if stage.missing or not stage.minutes]
    assert [stage.name for stage in stages(MI325X, *ON_GPUS) if stage.missing] == ["image"]
    assert f"{IMAGE}\n" in (ROOT / "Dockerfile").read_text().replace(" ", "\n")


@pytest.mark.parametrize("gpus", [0, 7])
def test_a_machine_without_the_gpus_of_the_asked_recipes_is_refused(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "detect", lambda *_: Machine(MI325X.devices[:gpus]))
    monkeypatch.setattr(Probe, "ask_hub", lambda *_: None)
    asked = ["accept", "--recipe", "agent", "--recipe", "eagle3", "--runs", str(tmp_path)]
    refused = CliRunner().invoke(app, asked)
    assert isinstance(refused.exception, KimiError) and refused.exception.exit_code == 1, refused.output
    assert refused.exception.what.startswith("NOT ACCEPTED: doctor: agent: gpus: "), refused.exception.what
    assert refused.exception.what.endswith("; 0 of 12 stages passed, 1 failed, 11 not run")
    assert refused.output.index("NOT ACCEPTED: doctor: agent: gpus: ") < refused.output.index("page: ")
    assert {path.name for path in tmp_path.glob("*/doctor-*.json")} == {"doctor-agent.json", "doctor-eagle3.json"}


def test_the_built_in_model_on_a_cpu_proves_nothing_about_gpus() -> None:
    here = stages(Machine(), "tiny", "eagle3-opt")
    outcomes = ended(here, {stage.name: MISSING for stage in here if stage.missing})
    assert {"doctor", "tiny: smoke", "tiny: lossless"} <= {
        name for name, result in outcomes.items() if result.verdict is Verdict.PASS
    }
    assert {settled(claim, outcomes)[0] for claim in CLAIMS} == {Verdict.NOT_RUN}


@pytest.mark.parametrize(
    ("changes", "verdict", "found"),
    [
        ({}, Verdict.PASS, "well"),
        ({"eagle3: con40": FAILED}, Verdict.FAIL, "<b>a GPU fell off"),
        ({"eagle3: con2": MISSING}, Verdict.NOT_RUN, "needs a gfx942 GPU"),
        ({"eagle3: con2": replace(MISSING, found="not reached")}, Verdict.NOT_RUN, "not reached"),
        ({"eagle3: con40": StageResult("300 tok/s", Verdict.SLOW)}, Verdict.SLOW, "300 tok/s"),
        ({"eagle3: con40": StageResult("other GPUs", Verdict.MEASURED)}, Verdict.MEASURED, "other GPUs"),
        ({"eagle3: chat": StageResult("nothing beside it", Verdict.MEASURED)}, Verdict.PASS, "well"),
        ({"eagle3: accuracy": FAILED}, Verdict.PASS, "well"),
    ],
)
def test_one_stage_that_did_not_pass_is_enough(changes: dict[str, StageResult], verdict: Verdict, found: str) -> None:
    here = stages(MI325X, "w4a8", "eagle3")
    (claim,) = (claim for claim in CLAIMS if claim.left_open == "con2 and con40 on 8 GPUs")
    assert settled(claim, ended(here, changes)) == (verdict, found)


def test_the_page_has_every_row_and_the_bundle_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    here = stages(MI325X, "w4a8", "eagle3")
    content = page(AcceptResult({"sglang": "1.2"}, ended(here, {"eagle3: smoke": FAILED})))
    html = write_page(content, folder).read_text()
    assert html.index('<h1 class="worse">NOT ACCEPTED: ') < html.index("<img") < html.index("<table>")
    for claim in CLAIMS:
        assert claim.left_open.replace("'", "&#39;").replace("`", "") in html
    for text in ("passed", "failed", "not run", "27.41", "&lt;b&gt;a GPU", "needs eight MI355X", "sglang 1.2"):
        assert text in html, text
    assert "<b>a GPU" not in html and "http" not in html and not (folder / "lead.svg").read_text().count("<b>")
    with tarfile.open(write_bundle(folder)) as archive:
        assert sorted(archive.getnames()) == ["run", "run/lead.svg", "run/report.html"]

"""What is left to prove is the table of docs/verified.md; what a run proved follows from its stages alone."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from kimi_w4a8_eagle3.accept.claims import CLAIMS, rows, write_bundle, write_page
from kimi_w4a8_eagle3.accept.journal import Figure, Journal, Outcome, Stage
from kimi_w4a8_eagle3.accept.stages import IMAGE, ON_GPUS, Sizes, Trial, predicted
from kimi_w4a8_eagle3.bench.single import Texts
from kimi_w4a8_eagle3.bench.workloads import load_workload
from kimi_w4a8_eagle3.machine.hardware import Device, Machine
from kimi_w4a8_eagle3.predict.machine_model import Cluster
from kimi_w4a8_eagle3.predict.predict import calibrate, check
from kimi_w4a8_eagle3.recipe.launch import load_recipe

ROOT = Path(__file__).parents[2]
MI325X = Machine((Device("gfx942", 304, "0000:01:00.0", 0, 256 << 30),) * 8)
PASSED = Outcome(state="passed", found="well", figures=[Figure(name="TPOT", value=27.4, unit="ms", published=27.41)])
FAILED = Outcome(state="failed", found="<b>a GPU fell off")
MISSING = Outcome(state="not run", found="needs a gfx942 GPU")


def stages(machine: Machine, *recipes: str) -> list[Stage]:
    return Trial(Path(), recipes, Sizes(), Console(quiet=True), Texts(), machine=machine).stages()


def test_the_rows_are_what_the_readme_leaves_unproved() -> None:
    """A row that the page gains, loses or words anew is changed in `claims.CLAIMS` too."""
    table = (
        (ROOT / "docs/verified.md")
        .read_text()
        .partition("| what | proved here by | not proved |")[2]
        .partition("\n\n")[0]
    )
    lines = [re.split(r" \| ?", line.strip("| ") + " ") for line in table.splitlines()[2:]]
    left_open = [(line[0], line[2].strip()) for line in lines if len(line) > 2 and line[2].strip()]
    assert [claim.left_open for claim in CLAIMS] == [text for _, text in left_open]
    assert [what for claim, (what, _) in zip(CLAIMS, left_open, strict=True) if not what.startswith(claim.what)] == []


def test_every_claim_is_settled_by_stages_of_the_mi325x_recipes_or_says_why_not() -> None:
    proves = {stage.proves for stage in stages(MI325X, *ON_GPUS)}
    assert {key for claim in CLAIMS for key in claim.settled_by} == proves
    assert [claim.what for claim in CLAIMS if bool(claim.settled_by) == bool(claim.otherwise)] == []


@pytest.mark.parametrize("side", ["w4a8", "eagle3"])
def test_a_prediction_is_that_of_kimi_bench_predict(side: str) -> None:
    known = {(each.point, each.side, each.key): each.predicted for each in check(calibrate(Cluster()), Cluster())}
    length = 3.93 if side == "eagle3" else None
    found = predicted(load_recipe(side), load_workload("con40"), length, "tpot_median_ms")
    assert found == pytest.approx(known["con40", side, "tpot_median_ms"])
    assert predicted(load_recipe("tiny"), load_workload("tiny-con40"), 3.0, "tpot_median_ms") is None


def test_a_machine_with_eight_gpus_lacks_nothing_but_the_image() -> None:
    assert [stage.name for stage in stages(MI325X, *ON_GPUS) if stage.missing] == ["image"]
    assert f"{IMAGE}\n" in (ROOT / "Dockerfile").read_text().replace(" ", "\n")


def test_the_built_in_model_on_a_cpu_proves_nothing_about_gpus() -> None:
    here = stages(Machine(), "tiny", "eagle3-opt")
    outcomes = {stage.name: MISSING if stage.missing else PASSED for stage in here}
    assert {"doctor", "tiny: smoke", "tiny: lossless"} <= {name for name, each in outcomes.items() if each is PASSED}
    assert {row.verdict for row in rows(here, outcomes)} == {"not run"}


@pytest.mark.parametrize(
    ("changes", "verdict", "found"),
    [
        ({}, "proved", "well"),
        ({"eagle3: con40": FAILED}, "failed", "<b>a GPU fell off"),
        ({"eagle3: con2": MISSING}, "not run", "needs a gfx942 GPU"),
        ({"eagle3: chat": None}, "not run", "not reached"),
        ({"eagle3: accuracy": FAILED}, "proved", "well"),
    ],
)
def test_one_stage_that_did_not_pass_is_enough(changes: dict[str, Outcome | None], verdict: str, found: str) -> None:
    here = stages(MI325X, "w4a8", "eagle3")
    outcomes = {stage.name: PASSED for stage in here} | changes
    of_bench = {row.claim.left_open: row for row in rows(here, {n: o for n, o in outcomes.items() if o})}
    row = of_bench["con2 and con40 on 8 GPUs"]
    assert (row.verdict, row.found) == (verdict, found)


def test_the_page_has_every_row_and_the_bundle_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    here = stages(MI325X, "w4a8", "eagle3")
    outcomes = {stage.name: PASSED for stage in here} | {"eagle3: smoke": FAILED}
    page = write_page(here, Journal(identity={"sglang": "1.2"}, outcomes=outcomes), folder).read_text()
    for claim in CLAIMS:
        assert claim.left_open.replace("'", "&#39;").replace("`", "") in page
    for text in ("proved", "failed", "not run", "27.41", "&lt;b&gt;a GPU", "needs eight MI355X", "sglang 1.2"):
        assert text in page, text
    assert "<b>a GPU" not in page and "http" not in page
    with tarfile.open(write_bundle(folder)) as archive:
        assert archive.getnames() == ["run", "run/report.html"]

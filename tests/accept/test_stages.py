"""Which stages a machine runs, what they predict, and the page of what they found."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from kimi_w4a8_eagle3.accept.journal import Figure, Journal, Outcome, Stage, write_bundle, write_page
from kimi_w4a8_eagle3.accept.stages import IMAGE, ON_GPUS, Sizes, Trial, predicted
from kimi_w4a8_eagle3.bench.side import Texts
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


def test_a_cpu_runs_the_built_in_model_alone() -> None:
    here = {stage.name for stage in stages(Machine(), "tiny", "eagle3-opt") if not stage.missing}
    assert {"doctor", "tiny: smoke", "tiny: lossless"} <= here
    assert not [name for name in here if name.startswith(("eagle3-opt", "kernels"))]


def test_the_page_has_every_stage_and_the_bundle_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    outcomes = {stage.name: PASSED for stage in stages(MI325X, "w4a8", "eagle3")}
    outcomes |= {"eagle3: smoke": FAILED, "image": MISSING}
    page = write_page(Journal(identity={"sglang": "1.2"}, outcomes=outcomes), folder).read_text()
    assert all(f"<td>{name}</td>" in page for name in outcomes)
    for text in ("passed", "failed", "not run", "27.41", "&lt;b&gt;a GPU", "needs a gfx942 GPU", "sglang 1.2"):
        assert text in page, text
    assert "<b>a GPU" not in page and "http" not in page
    with tarfile.open(write_bundle(folder)) as archive:
        assert archive.getnames() == ["run", "run/report.html"]

"""The kernels' process on a machine without a GPU: its figures and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import GPUS
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import FORMATS, WeightFormat
from kimi_w4a8_lab.accept.kernel_stage import check_kernels, ideal_us, run_child
from kimi_w4a8_lab.predict.machine_model import experts_touched, kimi

SMALL, KIMI = MoeShape(6, 208, 80, 3), MoeShape(384, 7168, 256, 8)


@pytest.mark.parametrize("weights", FORMATS.values(), ids=repr)
def test_the_process_writes_its_figures(tmp_path: Path, weights: WeightFormat) -> None:
    shape = MoeShape(6, 256, 128, 3, weights=weights)
    (figure,) = check_kernels("reference", shape, {}, tmp_path / "reference.json")
    assert figure.value == 0.0 and "2 batch sizes" in figure.name
    assert "tokens=8" in (tmp_path / "reference.log").read_text()


def test_the_error_of_the_process_is_reported_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(KimiError, match="flydsl backend cannot run: needs a gfx942 GPU"):
        check_kernels("flydsl", SMALL, {}, tmp_path / "flydsl.json")


def test_a_killed_process_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(KimiError, match="signal 6: Memory access fault") as caught:
        run_child(["-c", "import os; os.write(2, b'Memory access fault'); os.abort()"], {}, tmp_path / "child.log")
    assert caught.value.where == str(tmp_path / "child.log")


def test_the_roofline_is_that_of_the_documented_floors() -> None:
    """docs/perf/kernels.md; its matrix floors count padded rows, these do not."""
    gpu = GPUS["mi325x"]
    for tokens, floors in ((8, [18.2, 9.1]), (160, [113.4, 56.7])):
        experts = experts_touched(tokens, kimi())
        assert [round(ideal_us(KIMI, stage, tokens, experts, gpu), 1) for stage in (1, 2)] == floors
    assert 117.4 < ideal_us(KIMI, 1, 10240, 384, gpu) < 271.0

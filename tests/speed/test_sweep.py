"""A sweep: what a resumed run repeats, the speed-up by shape, and the files in InferenceX's form."""

import json

import pytest
from support.every_page import Copies

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD
from kimi_w4a8_eagle3.recipe.launch import load_recipe, with_settings
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.report.analysis import Analysis
from kimi_w4a8_lab.report.measured import page
from kimi_w4a8_lab.report.shapes import Shape, sentences, shapes
from kimi_w4a8_lab.speed import inferencex
from kimi_w4a8_lab.speed.bench import Plan, left, resumed, saved, seeded
from kimi_w4a8_lab.speed.inferencex import method_of
from kimi_w4a8_lab.speed.runs import Run, read_run
from kimi_w4a8_lab.speed.statistics import Interval
from kimi_w4a8_lab.speed.workloads import Workload, load_workload, with_changes


def test_a_resumed_run_repeats_what_is_missing_or_broken(copies: Copies) -> None:
    run = copies("a", "tiny", count=3)
    plan = with_changes(load_workload("tiny-con2"), num_prompts=run.result.measurements[0].num_prompts)
    content = json.loads((run.folder / "result.json").read_text())
    for number, measurement in enumerate(content["measurements"]):
        again = seeded(plan, number)
        measurement |= {"workload": again.model_dump(), "seed": again.seeds[0]}
    content["measurements"][1]["problems"] = ["2 of 6 requests failed"]
    content |= {"status": "incomplete"}
    (run.folder / "result.json").write_text(json.dumps(content))
    finished = resumed(run.folder, Plan([Target(recipe="tiny")], [plan]))
    with saved(finished, print):
        assert [found.repetition_index for found in finished.result.measurements] == [0, 2]
        assert [left(finished, "tiny", [plan], [number]) for number in range(4)] == [False, True, False, True]
    assert read_run(run.folder).result.status == "complete"
    other = plan.model_copy(update={"output_len": 9})
    for side, work in (("tiny", other), ("w4a8", plan)):
        with pytest.raises(KimiError, match="this run measured"):
            resumed(run.folder, Plan([Target(recipe=side)], [work]))


def _measured(copies: Copies, names: tuple[str, ...] = ("tiny-1k1k", "tiny-8k1k")) -> list[Run]:
    """Runs of two shapes without and with drafts; a plain step takes three times as long as a verify step."""
    runs = []
    for name in names:
        runs.append(copies(f"{name}-plain", "tiny:plain", 3.0, workload=_at_two(name), acceptance=None))
        runs.append(copies(f"{name}-fast", "tiny", 1.0, workload=_at_two(name)))
    return runs


def _at_two(name: str) -> Workload:
    return load_workload(name).model_copy(update={"concurrency": [2]})


def test_the_speedup_of_a_shape_is_split_into_its_causes(copies: Copies) -> None:
    analysis = Analysis(_measured(copies))
    found = shapes(analysis)
    assert [(one.lengths, one.side, one.concurrency) for one in found] == [("64/64", "tiny", 2), ("512/64", "tiny", 2)]
    curve = analysis.measured_speedups["tiny-1k1k", 2, "tiny"]
    assert [found[0].speedup.value, curve.measured, curve.at(curve.accept_length)] == pytest.approx([3.0] * 3)
    assert found[0].step_ratio == pytest.approx(curve.step_ms / (curve.base_step_ms or 0))
    assert 0 < found[0].decoding <= 1
    shown = page(analysis)
    assert (
        shown.title.startswith("tiny at concurrency 2: ") and shown.chart is not None and shown.chart.name == "shapes"
    )
    assert "Shapes" in [section.title for section in shown.sections if section.filled]


def test_a_long_input_explains_a_smaller_speedup() -> None:
    times = {"accept_length": 2.4, "plain_tok_s": 1.0, "tok_s": 1.0, "concurrency": 8, "side": "eagle3"}
    near = Shape("1k1k", "1,024/1,024", speedup=Interval(1.9, None, None), step_ratio=1.2, decoding=0.95, **times)
    far = Shape("8k1k", "8,192/1,024", speedup=Interval(1.2, None, None), step_ratio=1.6, decoding=0.5, **times)
    assert near.decode_speedup == pytest.approx(2.0) and near.together == pytest.approx(1 / (0.05 + 0.95 / 2))
    assert far.together == pytest.approx(1 / (0.5 + 0.5 / 1.5))
    (said,) = sentences([near, far])
    assert "1.90x on 1,024/1,024 and 1.20x on 8,192/1,024" in said.text
    assert "Decoding is 95% and 50%" in said.text and "1.20 and 1.60 plain steps" in said.text


def test_a_sweep_is_written_in_the_form_of_inferencex(copies: Copies) -> None:
    fast = copies("fast", "eagle3", workload=load_workload("8k1k"), concurrency=4)
    targets = {"eagle3": {"recipe": "eagle3", "settings": ["tp-size=4"]}}
    record = json.loads((fast.folder / RECORD).read_text()) | {"targets": targets}
    (fast.folder / RECORD).write_text(json.dumps(record))
    folder = inferencex.export(read_run(fast.folder))
    assert folder is not None
    (branch,) = json.loads((folder / "eagle3.yaml").read_text()).items()
    (main,) = json.loads((folder / "eagle3.main.yaml").read_text()).items()
    assert branch[0] == main[0] == "kimik2.5-int4-mi325x-sglang-eagle3"
    for (_, made), method in ((branch, "eagle3"), (main, "mtp")):
        layout = {"tp": 4, "ep": 1, "dp-attn": False, "spec-decoding": method, "conc-list": [4]}
        shape = {"isl": 8192, "osl": 1024, "search-space": [layout]}
        assert made == {  # InferenceX refuses other keys
            "image": "built by Dockerfile", "model": "amd/Kimi-K2.5-W4A8", "model-prefix": "kimik2.5",
            "runner": "mi325x", "precision": "int4", "framework": "sglang", "multinode": False,
            "scenarios": {"fixed-seq-len": [shape]},
        }  # fmt: skip
    (noted,) = json.loads((folder / "eagle3.sidecar.json").read_text())["results"]
    found = json.loads((folder / f"{noted['environment']['RESULT_FILENAME']}.json").read_text())
    assert found["model_id"] == "amd/Kimi-K2.5-W4A8" and found["total_token_throughput"] > found["output_throughput"]
    assert noted["environment"]["SPEC_DECODING"] == "eagle3" and noted["accept_length"] > 1
    assert not [name for name, value in found.items() if "tpot" in name and not value]  # InferenceX divides by them


@pytest.mark.parametrize(
    ("recipe", "draft", "method"),
    [
        ("w4a8", None, "none"),
        ("eagle3:plain", None, "none"),
        ("eagle3", None, "eagle3"),
        ("eagle3", "amd/kimi-k2.5-eagle3-fp8", "eagle3_fp8"),
    ],
)
def test_the_method_is_the_articles_name(recipe: str, draft: str | None, method: str) -> None:
    assert method_of(with_settings(load_recipe(recipe), {"draft.repo": draft} if draft else {})) == method

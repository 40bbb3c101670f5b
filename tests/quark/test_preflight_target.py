"""Each way a target checkpoint can be wrong gets one message with file, tensor, what was found and what to do."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.kimi_checkpoint import EXPERTS, HIDDEN, INTER, LAYERS, edit_json, edit_tensor, read_shards, rewrite, seeing

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import PreflightReport, preflight
from kimi_w4a8_eagle3.quark.target_checks import Problem

PREFIX = "language_model.model.layers"
GATE = f"{PREFIX}.1.mlp.experts.2.gate_proj.weight"
SHARED = f"{PREFIX}.3.mlp.shared_experts.up_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], None]
SHARD = "model-00002-of-00002.safetensors"  # odd layers


def only_problem(target: Path) -> Problem:
    report = preflight(target)
    assert len(report.problems) == 1, [p.message for p in report.problems]
    with pytest.raises(KimiError) as caught:
        report.raise_for_problems()
    assert caught.value.what == report.problems[0].message
    return report.problems[0]


def name_of(weight: str) -> str:
    return weight.removesuffix(".weight")


def last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a tensor with another last value."""
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor(tensor.numel() - 1), value).view_as(tensor)


def test_many_missing_tensors_are_one_counted_problem(target: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("weight_scale_2")]:
            del tensors[name]

    rewrite(target, drop)
    problem = only_problem(target)
    assert problem.count == (LAYERS - 1) * EXPERTS * 3 and len(problem.tensors) == 3
    assert problem.message.endswith("and 57 more")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scale_shapes_that_are_accepted(target: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            tensors[name] = tensors[name].reshape(shape).to(dtype)

    rewrite(target, reshape)
    assert preflight(target).ok


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_every_small_tensor_is_read(tmp_path: Path, value: float) -> None:
    """Twenty tensors of the built-in target: norms, router, its bias, scales, embedding, head, latents, tower."""
    folder = seeing(tmp_path / "seeing")
    tensors = [(n, t) for shard in read_shards(folder).values() for n, t in shard.items() if t.is_floating_point()]
    kinds = {re.sub(r"\d+", "N", name): name for name, _ in tensors}  # the last of each kind
    planted = sorted(kinds.values())[:: max(1, len(kinds) // 20)][:20]
    assert len(planted) == 20 and any("norm" in n for n in planted) and any("_scale" in n for n in planted)
    for number, name in enumerate(planted):
        broken = Path(shutil.copytree(folder, tmp_path / str(number)))
        edit_tensor(broken, name, last(value))
        problem = only_problem(broken)
        assert problem.found.startswith("NaN or Inf in 1 of ") and problem.tensors == (name,)
        shutil.rmtree(broken)


def test_a_draft_with_a_nan_is_refused(target: Path, draft: Path) -> None:
    edit_tensor(draft, "norm.weight", lambda norm: torch.full_like(norm, float("nan")))
    (problem,) = preflight(target, draft).problems
    assert problem.message == f"NaN or Inf in {HIDDEN} of {HIDDEN} values: norm.weight"


@pytest.mark.parametrize(
    ("suffix", "value", "found", "expected"),
    [
        *(
            (end, None, f"weight{end} is missing", "one for each expert projection")
            for end in ("", "_scale", "_scale_2")
        ),
        ("", torch.zeros(INTER, HIDDEN // 8 + 1, dtype=torch.int32), "weight is I32 [32, 9]", "I32 [32, 64/8 = 8]"),
        ("", torch.zeros(INTER, HIDDEN // 2, dtype=torch.uint8), "weight is U8 [32, 32]", "I32 [32, 64/8 = 8]"),
        ("_scale", torch.ones(INTER), "weight_scale is F32 [32]", "F32 [] or [1]"),
        ("_scale_2", torch.ones(INTER + 1), "weight_scale_2 is F32 [33]", "F32 [32]"),
        ("_scale_2", torch.ones(INTER, dtype=torch.bfloat16), "weight_scale_2 is BF16 [32]", "F32 [32]"),
    ],
)
def test_missing_tensor_wrong_shape_or_dtype(
    target: Path, suffix: str, value: torch.Tensor | None, found: str, expected: str
) -> None:
    edit_tensor(target, GATE + suffix, lambda _: value)
    problem = only_problem(target)
    assert (problem.found, problem.expected) == (found, expected)
    assert problem.tensors == (GATE + suffix,) and problem.where == str(target if value is None else target / SHARD)
    assert "kimi-w4a8 quantize" in problem.remedy


def tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return lambda target: edit_tensor(target, name, lambda _: value)


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change config.json's quantization_config."""
    return lambda target: edit_json(target / "config.json", lambda found: change(found["quantization_config"]))


def restore(target: Path) -> None:
    edit_tensor(target, GATE, lambda _: torch.zeros(INTER, HIDDEN, dtype=torch.bfloat16))
    for suffix in ("_scale", "_scale_2"):
        edit_tensor(target, GATE + suffix, lambda _: None)


PACKED = tensor(SHARED, torch.zeros(INTER, HIDDEN // 8, dtype=torch.int32))
NAN = torch.tensor(float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([restore], f"expert is not quantized (BF16): {GATE}"),
        ([tensor(f"{GATE}_scale", NAN)], f"NaN or Inf in 1 of 1 values: {GATE}_scale"),
        ([config(lambda q: q["exclude"].append(name_of(GATE)))], f"routed expert is in the exclude list: {GATE}"),
        ([PACKED], f"excluded layer is quantized (I32): {SHARED}"),
        (
            [PACKED, config(lambda q: q["exclude"].remove(name_of(SHARED)))],
            f"layer outside the routed experts is quantized (I32): {SHARED}",
        ),
        (
            [config(lambda q: q["exclude"].remove(name_of(SHARED)))],
            f"layer is neither quantized (BF16) nor excluded: {SHARED}",
        ),
        ([config(lambda q: q["exclude"].append("re:("))], "exclude pattern is not a regular expression"),
        ([config(lambda q: q["export"].update(pack_method="order"))], "pack_method is 'order'"),
    ],
)
def test_one_mistake_is_one_problem(target: Path, changes: list[Callable[[Path], None]], message: str) -> None:
    for change in changes:
        change(target)
    problem = only_problem(target)
    assert problem.message.startswith(message)
    assert problem.tensors or problem.where == str(target / "config.json")


PATTERNS = ["re:.*self_attn.*", "re:.*lm_head", "re:.*mlp\\.(gate|up|down)_proj$", "re:.*shared_experts.*"]
EXCLUDES: dict[str, Callable[[list[str]], list[str]]] = {
    "names": lambda names: names,
    "names without language_model.": lambda names: [name.removeprefix("language_model.") for name in names],
    "regular expressions": lambda names: PATTERNS,
    "a glob": lambda names: [*(name for name in names if "self_attn" not in name), "*self_attn*"],
}


@pytest.mark.parametrize("form", EXCLUDES)
def test_excludes_count_as_the_loader_reads_them(target: Path, form: str) -> None:
    """In the place of names: without its meaning every attention layer would be neither quantized nor excluded."""
    config(lambda q: q.update(exclude=EXCLUDES[form](q["exclude"])))(target)
    report = preflight(target)
    assert report.ok and any("globs (*self_attn*)" in note for note in report.notes) == (form == "a glob")


def test_k_that_is_not_a_multiple_of_eight(target: Path) -> None:
    edit_json(target / "config.json", lambda found: found["text_config"].update(moe_intermediate_size=36))
    assert "K = moe_intermediate_size = 36 is not a multiple of 8" in [p.found for p in preflight(target).problems]


@pytest.mark.parametrize(
    ("tp", "messages"),
    [
        (1, []),
        (4, []),
        (8, ["num_attention_heads = 4", "TP 8 cuts a packed word of down_proj: 32 / 8 = 4 columns"]),
        (3, ["num_attention_heads = 4", "moe_intermediate_size = 32"]),
        (0, ["TP is 0"]),
    ],
)
def test_tensor_parallel_size(target: Path, tp: int, messages: list[str]) -> None:
    problems = preflight(target, tp=tp).problems
    assert len(problems) == len(messages)
    assert all(message in problem.found for message, problem in zip(messages, problems, strict=True))


@pytest.mark.parametrize(("draft", "where"), [(None, "model"), ("draft", "model, draft draft")])
def test_of_many_problems_the_first_five_are_shown(draft: str | None, where: str) -> None:
    problems = [Problem(f"problem {number}", name="files", expected="none") for number in range(7)]
    shown = [f"  - [files] problem {number}; expected none" for number in range(5)]
    for found, more in ((7, ["  - and 2 more"]), (5, [])):
        with pytest.raises(KimiError) as caught:
            PreflightReport("model", draft, 1, problems=problems[:found]).raise_for_problems()
        assert caught.value.where == where
        assert caught.value.what.splitlines() == [f"the checkpoint has {found} problems:", *shown, *more]


def test_other_quantizations_are_not_checked(target: Path) -> None:
    other = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(target / "config.json", lambda found: found.update(quantization_config=other))
    report = preflight(target)
    assert report.ok and report.weight_format == "fp8, not W4A8"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json contains a JSON list"),
        ('{"text_config": {"hidden_size": 64}}', "text.vocab_size: field required"),
        (json.dumps({"hidden_size": -1}), "text.hidden_size: input should be greater than 0"),
    ],
)
def test_config_that_is_missing_or_wrong(target: Path, content: str | None, message: str) -> None:
    path = target / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    problem = only_problem(target)
    assert message in problem.found and problem.where == str(path)


def test_no_such_directory(tmp_path: Path) -> None:
    assert only_problem(tmp_path / "absent").found == "no such model directory"
    nothing = preflight(tmp_path, tp=0)
    assert {nothing.shards, nothing.tensors, nothing.nbytes, nothing.small_tensors_read, nothing.seconds} == {0}


def test_report_is_json(target: Path) -> None:
    save_file({k: v for k, v in load_file(target / SHARD).items() if k != GATE}, target / SHARD)
    started = time.monotonic()
    report = json.loads(json.dumps(preflight(target).to_json()))
    assert 0 < report["seconds"] <= time.monotonic() - started
    assert (report["model"], report["draft"], report["tp"]) == (str(target), None, 1)
    assert report["ok"] is False and report["problems"][0]["where"] == str(target / SHARD)


def without(suffix: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(("vision", "mm_")) and name.endswith(suffix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(("suffix", "count"), [("", 19), ("blocks.1.wqkv.bias", 1), ("proj.0.weight", 1)])
def test_a_tower_whose_weights_are_missing(tmp_path: Path, suffix: str, count: int) -> None:
    folder = seeing(tmp_path / "seeing")
    assert preflight(folder).ok
    rewrite(folder, without(suffix))
    problem = only_problem(folder)
    assert problem.found == "weight of the vision tower is missing" and problem.count == count
    edit_json(folder / "config.json", lambda config: config.update(language_model_only=True))
    assert preflight(folder).ok

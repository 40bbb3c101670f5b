"""Files and index: what is truncated, missing, malformed or unlisted is named, and nothing else is blamed for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from support.kimi_checkpoint import edit_json

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_eagle3.quark.safetensors_header import read_checkpoint, read_header
from kimi_w4a8_eagle3.quark.target_checks import find_non_finite

SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def problems(target: Path) -> list[str]:
    return [problem.found for problem in preflight(target).problems]


def test_header_agrees_with_the_library(quark_target: Path) -> None:
    tensors = read_header(quark_target / SHARD)
    with safe_open(quark_target / SHARD, framework="pt") as file:
        assert set(tensors) == set(file.keys())
        for name, info in tensors.items():
            view = file.get_slice(name)
            assert (list(info.shape), info.dtype) == (view.get_shape(), view.get_dtype())
    data = (quark_target / SHARD).read_bytes()
    info = next(t for t in tensors.values() if t.name.endswith("weight_scale_2"))
    with safe_open(quark_target / SHARD, framework="np") as file:
        assert data[info.start : info.start + info.nbytes] == file.get_tensor(info.name).tobytes()


@given(cut=st.integers(0, 3000))
@settings(max_examples=25, deadline=None)
def test_a_file_cut_anywhere_is_one_clear_error(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    data = save({"a": torch.zeros(3), "b": torch.zeros(2, 300)})
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    path.write_bytes(data[: min(cut, len(data) - 1)])
    with pytest.raises(KimiError, match="truncated or malformed"):
        read_header(path)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (None, ""),  # its last byte is missing
        (b"", "header too small"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header too large"),  # a Git LFS pointer instead of the file
        ((1 << 40).to_bytes(8, "little") + b"{}", "header too large"),
        ((5).to_bytes(8, "little") + b"{....", "invalid JSON"),
        ((500_000).to_bytes(8, "little") + b'{"a":' * 100_000, "recursion limit"),
    ],
)
def test_a_truncated_shard_or_malformed_header(target: Path, data: bytes | None, found: str) -> None:
    (target / SHARD).write_bytes((target / SHARD).read_bytes()[:-1] if data is None else data)
    (message,) = problems(target)
    assert message.startswith(f"{SHARD} is truncated or malformed: ") and found in message


def test_missing_shard_is_the_only_problem(target: Path) -> None:
    (target / SHARD).unlink()
    assert problems(target) == [f"{SHARD} is missing"]


def test_tensor_missing_from_its_shard(target: Path) -> None:
    def misplace(index: dict[str, dict[str, str]]) -> None:
        index["weight_map"]["language_model.model.extra.weight"] = SHARD

    edit_json(target / INDEX, misplace)
    assert problems(target) == [f"tensor language_model.model.extra.weight is not in {SHARD}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "index.json is missing beside 2 shards"),
        ("{", "cannot be read"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "places a in '../../etc/passwd'"),
        ('{"weight_map": {"a": 3}}', "places a in 3"),
        (r'{"weight_map": {"a": "a\u0000b.safetensors"}}', "places a in"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_bad_index(target: Path, text: str | None, message: str) -> None:
    (target / INDEX).unlink()
    if text is not None:
        (target / INDEX).write_text(text)
    (found,) = problems(target)
    assert message in found


def test_no_weights_at_all(target: Path) -> None:
    for path in (*target.glob("*.safetensors"), target / INDEX):
        path.unlink()
    assert problems(target) == [f"{INDEX} is missing, and so are the weights"]


def test_single_file_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.problems == [] and list(checkpoint.tensors) == ["a"]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, -2.5, float("nan"), float("inf")]), max_size=5), max_size=12))
@settings(max_examples=40, deadline=None)
def test_non_finite_values_are_found_where_they_are(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[float]]
) -> None:
    path = tmp_path_factory.mktemp("scales") / "model.safetensors"
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
    tensors = {f"t{i}": torch.tensor(v).to(dtypes[i % 6]) for i, v in enumerate(values)}
    save_file(tensors, path)
    infos = [t for i, t in enumerate(read_header(path).values()) if i % 5 != 4]  # leave gaps between the tensors
    found = {tensor.name: count for tensor, count in find_non_finite(infos)}
    expected = {t.name: int((~torch.isfinite(tensors[t.name].float())).sum()) for t in infos}
    assert found == {name: count for name, count in expected.items() if count}

"""Interrupted runs, full disks and bad sources: one message, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.kimi_checkpoint import edit_json, rewrite
from support.quantizing import quantize

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.safetensors_header import INDEX_NAME, read_checkpoint
from kimi_w4a8_lab.quantize import by_shard
from kimi_w4a8_lab.quantize.by_shard import quantize_by_shard
from kimi_w4a8_lab.quantize.quantize import quantize_w4a8
from kimi_w4a8_laptop import tiny

JOB = {"format": "w4a8"}


def test_an_interrupted_run_continues_with_the_next_shard(tmp_path: Path) -> None:
    """Real quantization, cut off in the middle of the second shard."""
    checkpoint, seen = read_checkpoint(tiny.target_bf16_path()), []

    def once(source: Path, result: Path) -> None:
        seen.append(next(source.glob("*.safetensors")).name)
        if len(seen) == 2:
            result.mkdir()
            (result / "half.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt
        quantize_w4a8(source, result)

    done: list[tuple[int, str]] = []

    def show(*progress: Any) -> None:
        done.append(progress)

    with pytest.raises(KeyboardInterrupt):
        quantize_by_shard(checkpoint, tmp_path / "out", once, JOB, show)
    assert not (tmp_path / "out").exists() and len(done) == 1
    outcome = quantize_by_shard(checkpoint, tmp_path / "out", once, JOB, show)
    assert (outcome.shards, outcome.resumed) == (3, 1)
    assert seen == [checkpoint.files[i].name for i in (0, 1, 1, 2)]
    assert done == [(number, "") for number in (1, 1, 2, 3)]
    for file in tiny.target_path().glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change", ["job", "source"])
def test_another_job_or_source_starts_anew(tmp_path: Path, change: str) -> None:
    source = Path(shutil.copytree(tiny.target_bf16_path(), tmp_path / "source"))
    checkpoint, calls = read_checkpoint(source), []

    def fails_second(folder: Path, result: Path) -> None:
        calls.append(folder)
        if len(calls) == 2:
            raise RuntimeError("stop")
        fake(folder, result)

    with pytest.raises(RuntimeError):
        quantize_by_shard(checkpoint, tmp_path / "out", fails_second, JOB, lambda *_: None)
    if change == "source":
        shard = checkpoint.files[0]
        save_file(load_file(shard), shard, metadata={"format": "pt"})
    job = JOB if change == "source" else {"format": "other"}
    outcome = quantize_by_shard(checkpoint, tmp_path / "out", fake, job, lambda *_: None)
    assert outcome.resumed == 0


def fake(source: Path, result: Path) -> None:
    """The files that a quantizer leaves, with the weights as they were; only order and records matter here."""
    result.mkdir()
    shard = next(source.glob("*.safetensors"))
    shutil.copyfile(shard, result / shard.name)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"exclude": [shard.stem]}}
    (result / "config.json").write_text(json.dumps(config))
    (result / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), shard.name)}))


def test_a_full_disk_is_found_before_anything_is_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_shard.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    result = quantize("w4a8-target", tiny.target_bf16_path(), tmp_path / "deep/er/out")
    assert "not enough disk" in str(result.exception) and not (tmp_path / "deep/er/out").exists()


@pytest.mark.parametrize(("place", "said"), [("", "not empty"), ("deep/er/out", "lies in the source")])
def test_a_destination_that_holds_something_or_is_in_the_source_is_left_alone(
    tmp_path: Path, place: str, said: str
) -> None:
    before = sorted(shutil.copytree(tiny.target_bf16_path(), source := tmp_path / "source").iterdir())
    result = quantize("w4a8-target", source, source / place)
    assert said in str(result.exception)
    assert sorted(source.iterdir()) == before and list(tmp_path.iterdir()) == [source]


def broken(source: Path, directory: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(source, directory)
    change(directory)
    return directory


def marked(method: str) -> Callable[[Path], None]:
    found = {"quantization_config": {"quant_method": method}}
    return lambda directory: edit_json(directory / "config.json", lambda config: config.update(found))


def lose_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def truncate(directory: Path) -> None:
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])


def drop(name: str) -> Callable[[Path], None]:
    return lambda directory: rewrite(directory, lambda tensors: tensors.pop(name))


def scatter(directory: Path) -> None:
    """Move the scale of one packed weight into the next shard."""
    first, second, _ = sorted(directory.glob("*.safetensors"))
    one, two = load_file(first), load_file(second)
    name = next(name for name in one if name.endswith(".weight_packed")).replace("_packed", "_scale")
    two[name] = one.pop(name)
    save_file(one, first)
    save_file(two, second)
    edit_json(directory / INDEX_NAME, lambda index: index["weight_map"].update({name: second.name}))


BF16, DRAFT, W4A8 = tiny.target_bf16_path, tiny.draft_path, tiny.target_path
BAD = {
    "already W4A8": ("w4a8-target", W4A8, lambda d: None, "already quantized: quark"),
    "already FP8 blocks": ("w4a8-target", BF16, marked("fp8"), "already quantized: fp8"),
    "quantized draft": ("fp8-draft", DRAFT, marked("quark"), "already quantized: quark"),
    "a missing shard": ("w4a8-target", BF16, lose_shard, "00002-of-00003.safetensors is missing"),
    "a truncated shard": ("fp8-draft", DRAFT, truncate, "truncated"),
    "a draft without fc": ("fp8-draft", DRAFT, drop("fc.weight"), "no fc.weight"),
    "a draft as target": ("w4a8-target", DRAFT, lambda d: None, "exclude patterns"),
    "no config": ("fp8-draft", DRAFT, lambda d: (d / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_source_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    command, original, change, message = BAD[kind]
    source = broken(original(), tmp_path / "source", change)
    result = quantize(command, source, tmp_path / "out")
    assert isinstance(result.exception, KimiError) and message in result.exception.what
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_packed_weight_in_two_shards_is_refused(packed: Path, tmp_path: Path) -> None:
    source = broken(packed, tmp_path / "source", scatter)
    result = quantize("w4a8-target", source, tmp_path / "out")
    assert "lie in two shards" in str(result.exception)


@pytest.mark.parametrize(("installed", "message"), [(None, "is not installed"), ("0.11.1", "0.11.1 is too old")])
def test_quark_missing_or_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, message: str
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    result = quantize("fp8-draft", tiny.draft_path(), tmp_path / "out")
    assert message in str(result.exception) and "pip install" in str(result.exception)
    assert not list(tmp_path.iterdir())

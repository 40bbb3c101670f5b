"""Quantize a checkpoint shard by shard, so that the next run continues an interrupted one.

Results are written to `.<name>.partial` beside the destination: the finished shards, and for each a record of its part
of the index and config. Only the complete folder is renamed to the destination.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import shortage
from kimi_w4a8_eagle3.quark.safetensors_header import INDEX_NAME, SINGLE_NAME, Checkpoint

QuantizeFolder = Callable[[Path, Path], None]
ShowShards = Callable[[int, str], object]  # finished shards and a note
_JOB, _DONE, _OUT, _WORK = "job.json", "done", "out", "work"


@dataclass(frozen=True)
class Outcome:
    """Result of a run: the number of shards, and how many of them an earlier, interrupted run had finished."""

    shards: int
    resumed: int


def quantize_by_shard(
    checkpoint: Checkpoint, destination: Path, quantize: QuantizeFolder, job: dict[str, Any], show: ShowShards
) -> Outcome:
    """Call `quantize(folder with one shard, new folder)` for each shard and put the results together.

    job: everything else that the result depends on; an earlier attempt continues only if it and the source are the
        same.

    Raises KimiError when the destination is not empty or in the source, or the disk too small. Finished shards stay in
    the partial folder for the next run.
    """
    if checkpoint.directory.resolve() in destination.resolve().parents:
        raise KimiError("the destination lies in the source", str(destination), remedy="choose a folder outside of it")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise KimiError("the destination is not empty", str(destination), remedy="choose a new folder or empty it")
    partial = destination.with_name(f".{destination.name}.partial")
    todo = _continue(partial, {**job, "source": _identity(checkpoint)}, checkpoint)
    # A quantized shard is smaller than its source.
    needed = sum(file.stat().st_size for file in todo)
    if error := shortage(destination.parent, needed, "choose a destination on another disk"):
        raise error
    for number, file in enumerate(checkpoint.files, start=1):
        if file in todo:
            _one_shard(checkpoint, file, partial, quantize)
        show(number, "")
    _finish(checkpoint, partial)
    if destination.exists():
        destination.rmdir()
    (partial / _OUT).rename(destination)
    shutil.rmtree(partial)
    return Outcome(len(checkpoint.files), len(checkpoint.files) - len(todo))


def _continue(partial: Path, job: dict[str, Any], checkpoint: Checkpoint) -> list[Path]:
    """Return the shards that are still to be done; an attempt at another job is deleted."""
    record = partial / _JOB
    if not record.is_file() or json.loads(record.read_text()) != job:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            for name in (_OUT, _DONE):
                (partial / name).mkdir(parents=True)
        except OSError as error:
            what = f"cannot write beside the destination: {error.strerror}"
            raise KimiError(what, str(partial.parent), "a writable folder") from error
        record.write_text(json.dumps(job))
    return [file for file in checkpoint.files if not (partial / _OUT / file.name).is_file()]


def _one_shard(checkpoint: Checkpoint, file: Path, partial: Path, quantize: QuantizeFolder) -> None:
    work = partial / _WORK
    shutil.rmtree(work, ignore_errors=True)
    source, result = work / "source", work / "result"
    source.mkdir(parents=True)
    shutil.copyfile(checkpoint.directory / "config.json", source / "config.json")
    (source / file.name).symlink_to(file.resolve())
    quantize(source, result)
    index = json.loads((result / INDEX_NAME).read_text())
    config = json.loads((result / "config.json").read_text())
    # The shard is moved last, so its presence means that its record exists too.
    (partial / _DONE / f"{file.name}.json").write_text(json.dumps({"index": index["weight_map"], "config": config}))
    (result / file.name).rename(partial / _OUT / file.name)
    shutil.rmtree(work)


def _finish(checkpoint: Checkpoint, partial: Path) -> None:
    """Write index and config of the whole checkpoint, and copy the source's other files."""
    out = partial / _OUT
    records = [json.loads((partial / _DONE / f"{file.name}.json").read_text()) for file in checkpoint.files]
    weight_map = {name: shard for record in records for name, shard in record["index"].items()}
    config = records[0]["config"]
    config["quantization_config"]["exclude"] = sorted(
        {name for record in records for name in record["config"]["quantization_config"]["exclude"]}
    )
    for path in checkpoint.directory.iterdir():
        if path.is_dir():
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
        elif path.suffix != ".safetensors" and not path.name.lower().startswith("readme") and path.name != INDEX_NAME:
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=4, ensure_ascii=False))
    if checkpoint.files[0].name != SINGLE_NAME:
        total = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=4, ensure_ascii=False))


def _identity(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Return size and modification time of every file that the result depends on."""
    files = [checkpoint.directory / "config.json", *checkpoint.files]
    return {os.fspath(file.resolve()): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}

"""Compare what a rank has loaded with the checkpoint, and its kernels with the reference, before the engine serves.

A swapped expert, a changed scale or a kernel that drops a tile stops no engine; its answers only get a little worse. A
scale that is 1 % off changes no accuracy that 1,319 problems can show. Each parameter is therefore compared with the
files, bit for bit, while the model loads, and every expert with the reference backend on one token.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open

from ...base.errors import KimiError
from ...gates import read_gates
from ...quark.weight_format import INT4, WeightFormat
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

logger = logging.getLogger(__name__)

FEATURE = Feature(
    "the check of loaded weights", remove_when="never: SGLang does not compare what it loaded with the checkpoint"
)
_READERS = 8  # threads; one would need 100 s for the 63 GB of a rank of Kimi-K2.5
# What SGLang's loaders rename. Tensors that get the same name are one parameter, in this order.
_RENAMED = (
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
    (r"\.q_a_proj\.|\.kv_a_proj_with_mqa\.", ".fused_qkv_a_proj_with_mqa."),
    (r"\.[qkv]_proj\.", ".qkv_proj."),
    (r"\.wqkv\.", ".attn.qkv_proj."),
    (r"(vision_tower.*)\.wo\.", r"\1.attn.proj."),
    (r"(mm_projector)\.proj\.0", r"\1.linear_1"),
    (r"(mm_projector)\.proj\.2", r"\1.linear_2"),
    (r"^midlayer", "model.layers.0"),
    (r"^(fc|norm)\.", r"model.\1."),
)
_SECOND = re.compile(r"\.(up|kv_a|k|v)_proj")  # after gate; q_a; q
_LAYER = re.compile(r"layers\.(\d+)\.")
_folder: list[Path] = []  # the folder that SGLang's loader reads; empty for weights from elsewhere


@FEATURE.after("sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights")
def note_folder(found: tuple[str, list[str], bool], *_: object, **__: object) -> None:
    """Remember the folder with the safetensors files that a model is loaded from."""
    folder, safetensors = found[0], found[2]
    _folder[:] = [Path(folder)] if safetensors else []


@FEATURE.before("sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights")
def require_all_as_stored(model: torch.nn.Module, *_: object, **__: object) -> None:
    """Raise KimiError where a parameter outside the routed experts differs from the checkpoint's tensors."""
    if not _folder or not read_gates(os.environ).load_check:
        return
    from sglang.srt.distributed import get_tp_group  # SGLang's import order

    rank, blocks = get_tp_group().rank_in_group, dict[str, list[_Block]]()
    files = {name: file for name, file in _files(_folder[0]).items() if ".mlp.experts." not in name}
    for stored in sorted(files, key=_SECOND.findall):
        name = stored
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        blocks.setdefault(name, []).extend(_Block.parts(files[stored], stored, 3 if ".wqkv." in stored else 1))
    with ThreadPoolExecutor(_READERS) as readers:
        jobs = {
            name: readers.submit(_compare, name, parameter.data, blocks.get(name, []), rank)
            for name, parameter in model.named_parameters()
            if ".mlp.experts." not in name and parameter.dim()  # constants have no dimension
        }
    if unknown := [name for name, job in jobs.items() if not job.result()]:
        logger.info("not compared with %s: %s", _folder[0], ", ".join(unknown))


class _Block(NamedTuple):
    """Rows of a stored tensor, of which each rank has the same share."""

    file: Path
    name: str
    shape: tuple[int, ...]
    first: int
    rows: int

    @classmethod
    def parts(cls, file: Path, name: str, number: int = 1) -> list[_Block]:
        """Cut a tensor into parts of the same size."""
        shape = tuple(_opened(file).get_slice(name).get_shape())
        rows = math.prod(shape[:1]) // number
        return [cls(file, name, shape, part * rows, rows) for part in range(number)]

    def share(self, loaded: torch.Tensor, own: int, shares: int, rank: int) -> torch.Tensor:
        """Read a rank's rows, of which it has `own`, with as many columns as it has loaded."""
        file = _opened(self.file)
        if not self.shape:
            return cast(torch.Tensor, file.get_tensor(self.name).reshape(1))
        stored = file.get_slice(self.name)
        start = self.first + rank % shares * own
        rows = slice(start, min(start + own, self.first + self.rows))
        if loaded.dim() != 2:
            return stored[rows]
        width = loaded.shape[1]
        left = rank % (self.shape[1] // width) * width
        return stored[rows, left : left + width]


def _compare(name: str, loaded: torch.Tensor, blocks: list[_Block], rank: int) -> bool:
    """Raise KimiError if a parameter differs from its blocks; return False if their shapes do not tell its content."""
    shares = -(-sum(block.rows for block in blocks) // loaded.shape[0])
    for block in blocks:
        width, stored = loaded.shape[1:], block.shape[1:]
        split = loaded.dim() == len(stored) + 1 == 2 and stored[0] % width[0] == 0
        if (stored != width and not split) or (len(blocks) > 1 and block.rows % shares):
            return False
    own = [block.rows // shares if len(blocks) > 1 else loaded.shape[0] for block in blocks]  # a single one has padding
    if not shares or sum(own) != loaded.shape[0]:  # such as keys that several ranks share
        return False
    want = torch.cat([block.share(loaded, rows, shares, rank) for block, rows in zip(blocks, own, strict=True)])
    have, want = loaded[: len(want)], want.to(loaded.device, loaded.dtype)  # their device compares them
    if not torch.equal(have, want) and not torch.allclose(have.double(), want.double(), rtol=0, atol=0, equal_nan=True):
        raise KimiError(
            f"{name} did not load as it is stored",
            where=f"{blocks[0].name} (rank {rank})",
            expected="the checkpoint's values, bit for bit",
            remedy="check the files with `kimi-w4a8 fetch --verify` and start again; if they are right, this SGLang "
            "loads weights differently: report it (KIMI_LOAD_CHECK=0 skips this check)",
        )
    return True


def require_as_stored(layer_name: str, layer: FusedMoE, weights: WeightFormat = INT4) -> None:
    """Raise KimiError where the routed experts of a layer differ from the checkpoint's tensors.

    Weights that come from no safetensors file, such as with `--load-format dummy`, are not compared.
    """
    number = _LAYER.search(layer_name)
    if not _folder or number is None:
        return
    files = _files(_folder[0])
    wrapped = any(name.startswith("language_model.") for name in files)
    prefix = f"{'language_model.' * wrapped}model.layers.{number[1]}.mlp.experts."
    count = getattr(layer, "_num_local_routed", layer.w13_weight.shape[0])  # copies of the shared experts follow these
    first = getattr(layer, "_expert_storage_rank", 0) * count

    def compare(kind: str, expert: int) -> None:
        for name, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            names = [f"{prefix}{first + expert}.{part}.{kind}" for part in parts]
            loaded = torch.atleast_1d(getattr(layer, f"{name}_{kind}").data[expert])
            what = f"{name}_{kind} of expert {first + expert}"
            blocks = [block for one in names if one in files for block in _Block.parts(files[one], one)]
            if len(blocks) < len(names) or not _compare(what, loaded, blocks, layer.moe_tp_rank):
                raise KimiError(f"the checkpoint does not have {what}, or in another shape", where=names[0])

    with ThreadPoolExecutor(_READERS) as readers:
        for kind in ("weight_scale", "weight_scale_2", "weight") if weights == INT4 else ("weight_scale", "weight"):
            for _ in readers.map(partial(compare, kind), range(count)):
                pass  # the first expert that differs raises


@cache
def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, of those that SGLang loads."""
    logger.info("weights are compared with %s while they load", folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    return {name: file for file in folder.glob("*.safetensors") for name in list(_opened(file).keys())}


@cache
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

"""Compare each loaded MoE layer with the checkpoint, and its kernels with the reference, before the engine serves.

A swapped expert, a changed scale or a kernel that drops a tile stops no engine; its answers only get a little worse. A
scale that is 1 % off changes no accuracy that 1,319 problems can show. Each layer is therefore compared while it loads:
every scale and packed word of every expert with the files, bit for bit, and every expert with the reference backend on
one token.
"""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ..base.errors import KimiError
from ..quark.safetensors_header import Checkpoint, read_checkpoint
from ..quark.weight_format import INT4, WeightFormat
from .hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

logger = logging.getLogger(__name__)

FEATURE = Feature(
    "the check of loaded weights",
    remove_when="never: SGLang does not compare what it loaded with the checkpoint",
)
_READERS = 8  # threads; one would need 100 s for the 63 GB of a rank of Kimi-K2.5
_LAYER = re.compile(r"layers\.(\d+)\.")
_folder: list[Path] = []  # the folder that SGLang's loader reads; empty for weights from elsewhere


@FEATURE.after("sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights")
def note_folder(found: tuple[str, list[str], bool], *_: object, **__: object) -> None:
    """Remember the folder with the safetensors files that a model is loaded from."""
    folder, safetensors = found[0], found[2]
    _folder[:] = [Path(folder)] if safetensors else []


def require_as_stored(layer_name: str, layer: FusedMoE, weights: WeightFormat = INT4) -> None:
    """Raise KimiError where a layer's loaded parameters differ from the checkpoint's tensors.

    Weights that come from no safetensors file, such as with `--load-format dummy`, are not compared.
    """
    number = _LAYER.search(layer_name)
    if not _folder or number is None:
        return
    stored = _Stored(read_once(_folder[0]), int(number[1]), layer)
    with ThreadPoolExecutor(_READERS) as readers:
        for kind in ("weight_scale", "weight_scale_2", "weight") if weights == INT4 else ("weight_scale", "weight"):
            for _ in readers.map(partial(stored.compare, kind), range(stored.experts)):
                pass  # the first expert that differs raises


@cache
def read_once(folder: Path) -> Checkpoint:
    """Read the headers of the checkpoint's shards."""
    logger.info("MoE layers are compared with %s while they load", folder)
    return read_checkpoint(folder)


class _Stored:
    """Tensors of one layer of the checkpoint, cut for this rank."""

    def __init__(self, checkpoint: Checkpoint, number: int, layer: FusedMoE) -> None:
        self.checkpoint, self.layer = checkpoint, layer
        self.prefix = f"{checkpoint.text_prefix}layers.{number}.mlp.experts."
        self.rank, self.ranks = layer.moe_tp_rank, layer.moe_tp_size
        local = layer.w13_weight.shape[0]
        self.experts = getattr(layer, "_num_local_routed", local)  # copies of the shared experts follow these
        self.first = getattr(layer, "_expert_storage_rank", 0) * self.experts

    def compare(self, kind: str, expert: int) -> None:
        """Raise KimiError if an expert's loaded tensors differ from the file's; their device compares them."""
        gate, up, down = (self._read(expert, part, kind) for part in ("gate_proj", "up_proj", "down_proj"))
        for name, want in (("w13", torch.cat([gate, up])), ("w2", down)):
            loaded = getattr(self.layer, f"{name}_{kind}").data[expert].reshape(want.shape)
            if not torch.equal(loaded, want.to(loaded.device)):
                tensor = f"{self.prefix}{self.first + expert}.{'down_proj' if name == 'w2' else 'gate_proj'}.{kind}"
                raise KimiError(
                    f"expert {self.first + expert} did not load as it is stored: {name}_{kind}",
                    where=f"{tensor} (rank {self.rank} of {self.ranks})",
                    expected="the checkpoint's values, bit for bit",
                    remedy="check the files with `kimi-w4a8 fetch --verify` and start again; if they are right, "
                    "this SGLang loads experts differently: report it (KIMI_LOAD_CHECK=0 skips this check)",
                )

    def _read(self, expert: int, part: str, kind: str) -> torch.Tensor:
        """Read this rank's part of a tensor: rows of gate and up, columns of down, all of down's scales of rows."""
        name = f"{self.prefix}{self.first + expert}.{part}.{kind}"
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise KimiError(f"the checkpoint has no {part}.{kind} of expert {self.first + expert}", where=self.prefix)
        file, dimensions = _opened(info.file), len(info.shape)
        if kind == "weight_scale" and dimensions < 2:  # of the first stage
            return file.get_tensor(name).float().reshape(1)
        if part == "down_proj" and dimensions < 2:
            return file.get_tensor(name)
        stored = file.get_slice(name)
        axis = 1 if part == "down_proj" else 0
        size = info.shape[axis] // self.ranks
        own = slice(self.rank * size, (self.rank + 1) * size)
        return stored[:, own] if axis else stored[own]


@cache
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

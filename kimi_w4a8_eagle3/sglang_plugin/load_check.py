"""Compare each loaded MoE layer with the checkpoint, and its kernels with the reference, before the engine serves.

A swapped expert, a changed scale or a kernel that drops a tile stops no engine; its answers only get a little worse. A
scale that is 1 % off changes no accuracy that 1,319 problems can show. Each layer is therefore compared while it loads:
every scale and packed word of every expert with the files, bit for bit, and every expert with the reference backend on
one token.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ..base.errors import KimiError
from ..quark.weight_format import INT4, WeightFormat
from .hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

logger = logging.getLogger(__name__)

FEATURE = Feature(
    "the check of loaded weights", remove_when="never: SGLang does not compare what it loaded with the checkpoint"
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
    stored = _Stored(_files(_folder[0]), int(number[1]), layer)
    with ThreadPoolExecutor(_READERS) as readers:
        for kind in ("weight_scale", "weight_scale_2", "weight") if weights == INT4 else ("weight_scale", "weight"):
            for _ in readers.map(partial(stored.compare, kind), range(stored.experts)):
                pass  # the first expert that differs raises


@cache
def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, of those that SGLang loads."""
    logger.info("MoE layers are compared with %s while they load", folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    return {name: file for file in folder.glob("*.safetensors") for name in list(_opened(file).keys())}


class _Stored:
    """Tensors of one layer of the checkpoint, cut for this rank."""

    def __init__(self, files: Mapping[str, Path], number: int, layer: FusedMoE) -> None:
        self.files, self.layer = files, layer
        wrapper = "language_model." if any(name.startswith("language_model.") for name in files) else ""
        self.prefix = f"{wrapper}model.layers.{number}.mlp.experts."
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
        if name not in self.files:
            raise KimiError(f"the checkpoint has no {part}.{kind} of expert {self.first + expert}", where=self.prefix)
        file = _opened(self.files[name])
        stored = file.get_slice(name)
        shape = stored.get_shape()
        dimensions = len(shape)
        if kind == "weight_scale" and dimensions < 2:  # of the first stage
            return file.get_tensor(name).float().reshape(1)
        if part == "down_proj" and dimensions < 2:
            return file.get_tensor(name)
        axis = 1 if part == "down_proj" else 0
        size = shape[axis] // self.ranks
        own = slice(self.rank * size, (self.rank + 1) * size)
        return stored[:, own] if axis else stored[own]


@cache
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

"""Image processor of the built-in model, whose checkpoint contains no code, unlike Kimi-K2.5's.

SGLang's K2.5 processor calls it. A picture is scaled down until its patches fit, padded to whole tokens and cut into
patches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CONFIG = "preprocessor_config.json"


class TinyKimiProcessor:
    """Convert text and pictures to tensors.

    media_proc_cfg: `patch_size` in pixels. `merge_kernel_size`: patches per token in each direction. `in_patch_limit`
        and `patch_limit_on_one_side`: the largest picture in patches. `image_mean`, `image_std` of channels in [0, 1].
    """

    def __init__(self, tokenizer: Any, media_proc_cfg: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.media_proc_cfg = media_proc_cfg

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> TinyKimiProcessor:
        """Load the processor of the checkpoint in the folder `path`."""
        from transformers import AutoTokenizer  # start-up: takes seconds, and pictures alone do not need it

        config = json.loads((Path(path) / CONFIG).read_text())
        return cls(AutoTokenizer.from_pretrained(path, **options), config["media_proc_cfg"])

    @property
    def image_processor(self) -> TinyKimiProcessor:
        """This object: SGLang reads the part for pictures under this name and under `media_processor`."""
        return self

    @property
    def media_processor(self) -> TinyKimiProcessor:
        """See image_processor."""
        return self

    def media_tokens_calculator(self, media: Mapping[str, Any]) -> int:
        """Return the number of tokens of a picture."""
        _, (height, width) = self._sizes(media["image"])
        token = self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]
        return int(height // token * (width // token))

    def __call__(self, text: Sequence[str], medias: Sequence[Mapping[str, Any]] = (), **_: Any) -> dict[str, Tensor]:
        """Return `input_ids` int64 [rows, tokens]; with pictures also `pixel_values` and `grid_thws` of `pixels`."""
        ids = self.tokenizer(list(text), return_tensors="pt")["input_ids"]
        if not medias:
            return {"input_ids": ids}
        values, grids = zip(*(self.pixels(media["image"]) for media in medias), strict=True)
        return {"input_ids": ids, "pixel_values": torch.cat(values), "grid_thws": torch.tensor(grids)}

    def pixels(self, image: Image.Image) -> tuple[Tensor, tuple[int, int, int]]:
        """Return patches float32 [h * w, 3, patch, patch], and (1, h, w)."""
        c, ((height, width), (padded_height, padded_width)) = self.media_proc_cfg, self._sizes(image)
        scaled = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))
        padded = np.zeros((padded_height, padded_width, 3), np.float32)
        padded[:height, :width] = scaled
        side = c["patch_size"]
        h, w = padded_height // side, padded_width // side
        values = (padded / 255 - np.float32(c["image_mean"])) / np.float32(c["image_std"])
        patches = torch.from_numpy(values).view(h, side, w, side, 3).permute(0, 2, 4, 1, 3)
        return patches.reshape(h * w, 3, side, side), (1, h, w)

    def _sizes(self, image: Image.Image) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (height, width) after scaling, and (height, width) after padding."""
        c = self.media_proc_cfg
        side, longest = c["patch_size"], c["patch_limit_on_one_side"] * c["patch_size"]
        patches = [max(1, pixels // side) for pixels in image.size]
        scale = min(1.0, math.sqrt(c["in_patch_limit"] / math.prod(patches)), *(longest / size for size in image.size))
        width, height = (min(max(1, int(pixels * scale)), longest) for pixels in image.size)
        token = side * c["merge_kernel_size"]
        return (height, width), (-(-height // token) * token, -(-width // token) * token)


def register() -> None:
    """Register the processor with transformers, under a configuration that no checkpoint has."""
    from transformers import AutoProcessor, PretrainedConfig  # start-up: as above

    AutoProcessor.register(type("TinyKimiConfig", (PretrainedConfig,), {}), TinyKimiProcessor, exist_ok=True)

"""Preprocessing of pictures for the built-in model, compared with SGLang's own Kimi-K2.5 code."""

from __future__ import annotations

from support.sglang_program import BOTH, found

CUT = """
import json, random
import numpy as np, torch
from PIL import Image
from sglang.srt.multimodal.processors import kimi_k25 as sglang
from transformers import AutoProcessor
from kimi_w4a8_eagle3.gateway.pictures import Pads
from kimi_w4a8_laptop import tiny

processor = AutoProcessor.from_pretrained(str(tiny.target_path()))
config = {name: processor.media_proc_cfg[name] for name in
          ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side", "fixed_output_tokens")}
rng = random.Random(0)
sizes = [(112, 28), (512, 512), (1, 1), (1, 9000)] + [(rng.randint(1, 999), rng.randint(1, 999)) for _ in range(20)]
wrong = []
for width, height in sizes:
    theirs = sglang.navit_resize_config(width, height, **config)
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    scaled = image.resize((theirs["new_width"], theirs["new_height"]), Image.Resampling.BICUBIC)
    patches = sglang.normalize_and_patchify(
        torch.from_numpy(np.array(scaled)).permute(2, 0, 1)[None].float(),
        torch.full((1, 3, 1, 1), 2 / 255), torch.full((1, 3, 1, 1), -1.0), config["patch_size"],
        theirs["new_height"] + theirs["pad_height"], theirs["new_width"] + theirs["pad_width"],
    )[0]
    media = {"type": "image", "image": image}
    ours = processor(text=["<|media_pad|>"], medias=[media])
    same = (
        processor.media_tokens_calculator(media) == theirs["num_tokens"] == len(patches) // 4
        and ours["grid_thws"].tolist() == [[*sglang._grid_thw_from_resize_config(theirs, config["patch_size"])]]
        and torch.allclose(ours["pixel_values"], patches, rtol=0, atol=1e-6)
    )
    if not same:
        wrong.append([width, height])
    large = {**config, "in_patch_limit": 16384, "patch_limit_on_one_side": 512}  # Kimi-K2.5's
    for numbers in (config, large, {**config, "fixed_output_tokens": 5}):
        if Pads(**numbers).tokens(width * 5, height * 5) != sglang.navit_resize_config(
            width * 5, height * 5, **numbers
        )["num_tokens"]:
            wrong.append([width, height, numbers])
print(json.dumps([type(processor).__name__, ours["input_ids"].tolist(), wrong]))
"""


@BOTH
def test_pictures_are_cut_as_sglang_cuts_them(newest: bool) -> None:
    assert found(CUT, newest) == ["TinyKimiProcessor", [[17]], []]

"""Preprocessing and the vision tower of the built-in model, compared with SGLang's own Kimi-K2.5 code."""

from __future__ import annotations

import pytest
from support.sglang_program import BOTH, found

CUT = """
import json, random
import numpy as np, torch
from PIL import Image
from sglang.srt.multimodal.processors import kimi_k25 as sglang
from transformers import AutoProcessor
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
print(json.dumps([type(processor).__name__, ours["input_ids"].tolist(), wrong]))
"""
TOWER = """
import json, tempfile
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.models import kimi_k25
from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler
from kimi_w4a8_laptop import tiny
from proof.tiny.checkpoint import PREFIX, load_tower, read_tensors

words = "--device cpu --attention-backend intel_amx --mem-fraction-static 0.3"
args = prepare_server_args(["--model-path", str(tiny.target_path()), *words.split()])
set_global_server_args_for_scheduler(args)
model_config = ModelConfig.from_server_args(args)
with tempfile.NamedTemporaryFile() as rendezvous:
    parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(args, model_config)
    model_config.hf_config.encoder_only = True
    model = kimi_k25.KimiK25ForConditionalGeneration(model_config.hf_config).bfloat16()
    seen = {name: each for name, each in read_tensors(tiny.target_path()).items() if not name.startswith(PREFIX)}
    model.load_weights(iter(seen.items()))
    patches = torch.randn(3, 16, 3, 14, 14, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        ours = load_tower(tiny.target_path())(patches).flatten(0, 1).float()
        states = model.vision_tower(patches.flatten(0, 1), torch.tensor([[1, 2, 8]] * 3))
        theirs = kimi_k25.mm_projection_auto(model.mm_projector, states).float()
    torch.distributed.destroy_process_group()
print(json.dumps({"off": ((ours - theirs).norm() / theirs.norm()).item()}))
"""


@BOTH
def test_pictures_are_cut_as_sglang_cuts_them(newest: bool) -> None:
    assert found(CUT, newest) == ["TinyKimiProcessor", [[17]], []]


def test_sglang_loads_the_tower_and_computes_what_the_training_did() -> None:
    tower = found(TOWER)
    # BF16 keeps 8 bits of a value; the sums of both are rounded at every layer, in another order.
    assert tower["off"] == pytest.approx(0, abs=2**-7)

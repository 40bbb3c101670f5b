"""The plugin in SGLang's own framework: loaded by entry point, dispatching W4A8 and leaving the rest alone.

Runs in a subprocess, because hooks change SGLang for the whole process; once with the pinned release and once with
0.5.16, the newest release with a known ROCm image.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kimi_w4a8_eagle3

ROOT = Path(kimi_w4a8_eagle3.__file__).parents[1]
OLDER = Path(sys.prefix) / "compat" / "sglang-0.5.16"

DISPATCH = """
import json
from kimi_w4a8_eagle3.sglang_plugin import cpu
cpu.install()
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang
from sglang.srt.layers.quantization.quark.quark import QuarkConfig

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
DYNAMIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True}

def config(weight, inputs):
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return QuarkConfig.from_config({
        "quant_method": "quark", "packed_modules_mapping": {}, "global_quant_config": layer,
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "exclude": [f"language_model.model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")] + ["*lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    })

ours = config([FP8, INT4], DYNAMIC)
other = config(FP8, DYNAMIC)
module = torch.nn.Module()
from sglang.srt.layers.quantization.quark.utils import should_ignore_layer
def scheme(c):
    return type(c.get_moe_scheme(module, "language_model.model.layers.1.mlp.experts")).__name__
def ignored(c, name):
    return should_ignore_layer(name, ignore=c.exclude_layers, fused_mapping=c.packed_modules_mapping)
try:
    ours.get_linear_scheme(module, "language_model.model.layers.1.self_attn.o_proj")
    refused = ""
except Exception as error:
    refused = str(error)
print(json.dumps({
    "version": sglang.__version__,
    "ours": [type(ours).__name__, scheme(ours)],
    "other": [type(other).__name__, scheme(other)],
    "fused_mlp_excluded": ignored(ours, "language_model.model.layers.0.mlp.gate_up_proj"),
    "glob_excluded": ignored(ours, "language_model.lm_head"),
    "expert_excluded": ignored(ours, "language_model.model.layers.1.mlp.experts"),
    "refused": refused,
}))
"""


def run(program: str, older: bool) -> dict:
    path = [str(ROOT)] + ([str(OLDER)] if older else [])
    extra = {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "kimi_w4a8_eagle3"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env={**os.environ, **extra}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("older", [False, True], ids=["0.5.23", "0.5.16"])
def test_w4a8_gets_our_scheme_and_others_sglangs(older):
    if older and not OLDER.is_dir():
        pytest.fail(f"SGLang 0.5.16 is not installed in {OLDER}: `make venv` puts it there")
    found = run(DISPATCH, older)
    assert found["version"] == ("0.5.16" if older else "0.5.23")
    assert found["ours"] == ["W4A8QuarkConfig", "QuarkInt4Int8MoE"]
    assert found["other"] == ["QuarkConfig", "QuarkW8A8FP8MoE"]
    assert found["fused_mlp_excluded"] and found["glob_excluded"] and not found["expert_excluded"]
    assert "not excluded from W4A8 quantization" in found["refused"]

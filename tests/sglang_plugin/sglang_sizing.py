"""Run by `support.sglang_program`: the pool that SGLang's own code makes in the memory of each case in argv[3] (JSON).

A case is [HBM bytes, weight bytes, words of the command line]. Nothing but the reading of the GPU's memory is replaced.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

GIB = 1 << 30


def sized(target: str, draft: str, hbm: int, weights: int, words: list[str]) -> int:
    args = prepare_server_args(["--model-path", target, "--device", "cpu", "--trust-remote-code", *words])
    set_global_server_args_for_scheduler(args)
    owner = object.__new__(KVCacheConfigurator)
    owner.server_args, owner.page_size, owner.is_draft_worker = args, 1, False
    if hasattr(KVCacheConfigurator, "draft_parallel_layout"):  # since 0.5.23
        owner.draft_parallel_layout = None
    owner.kv_cache_dtype, owner.kv_cache_dtype_str = torch.bfloat16, "auto"
    owner.device, owner.gpu_id, owner.use_mla_backend = "cuda", 0, True
    owner.model_config = ModelConfig.from_server_args(args)
    owner.mambaish_config, owner.post_capture_kv_active, owner.is_hybrid_swa = None, False, False
    layers = owner.model_config.num_hidden_layers
    owner.layer_info = SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers)
    owner.spec_algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    owner.spec_aux_config = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=args, model_config=owner.model_config, spec_algorithm=owner.spec_algorithm, is_draft_worker=False
    )
    kv_cache_configurator.get_available_gpu_memory = lambda *_, **__: (hbm - weights) / GIB
    world = SimpleNamespace(world_size=1, cpu_group=None)
    if hasattr(kv_cache_configurator, "get_world_group"):
        kv_cache_configurator.get_world_group = lambda: world
    else:  # since 0.5.23
        get_parallel().override_permanently(world_group=world, launch_world_size=1)
    return int(owner.config_from_budget(owner._profile_available_bytes(hbm / GIB)).max_total_num_tokens)


if __name__ == "__main__":
    target, draft, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    print("\n" + json.dumps([sized(target, draft, *case) for case in cases]))

"""Run by `support.sglang_program`: the pools that SGLang's own code makes for the target and the draft in argv.

With cases in argv[3] (JSON), each [HBM bytes, weight bytes, words of the command line], it prints the pool of each in
the memory of a GPU, of which nothing but the reading is replaced. Without cases it prints what SGLang settles on for a
request of 50 G tokens under several gates.
"""

from __future__ import annotations

import json
import os
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

from kimi_w4a8_eagle3.sglang_plugin.memory import page_guard_hook

GIB = 1 << 30
REQUESTED = 50_000_000_000
WORDS = "--attention-backend intel_amx --mem-fraction-static 0.3 --speculative-algorithm EAGLE3 "
WORDS += "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"


def configurator(target: str, words: list[str]) -> KVCacheConfigurator:
    """The object that sizes the target's pool, with everything that sizing reads and no model behind it."""
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
    return owner


def in_memory(target: str, hbm: int, weights: int, words: list[str]) -> int:
    owner = configurator(target, words)
    kv_cache_configurator.get_available_gpu_memory = lambda *_, **__: (hbm - weights) / GIB
    world = SimpleNamespace(world_size=1, cpu_group=None)
    if hasattr(kv_cache_configurator, "get_world_group"):
        kv_cache_configurator.get_world_group = lambda: world
    else:  # since 0.5.23
        get_parallel().override_permanently(world_group=world, launch_world_size=1)
    return int(owner.config_from_budget(owner._profile_available_bytes(hbm / GIB)).max_total_num_tokens)


def requested(owner: KVCacheConfigurator, **gates: str) -> int:
    for name in ("KIMI_PAGE_GUARD", "KIMI_PAGE_GUARD_INT_MAX"):
        os.environ.pop(name, None)
    os.environ.update(gates)
    return int(owner._apply_token_constraints(REQUESTED))


def guarded(target: str, draft: str) -> dict[str, object]:
    pool = configurator(target, ["--speculative-draft-model-path", draft, *WORDS.split()])
    draft_rows = [shape.row_elements for shape in page_guard_hook._shapes(pool) if shape.kind == "mha"]
    results: dict[str, object] = {
        "requested": REQUESTED,
        "draft_row_elements": draft_rows,
        "auto": requested(pool),
        "off": requested(pool, KIMI_PAGE_GUARD="off", KIMI_PAGE_GUARD_INT_MAX="1000"),
        "force": requested(pool, KIMI_PAGE_GUARD="force"),
        "force_small": requested(pool, KIMI_PAGE_GUARD="force", KIMI_PAGE_GUARD_INT_MAX="128000"),
    }
    page_guard_hook.attention_backends = lambda: {"aiter"}
    results["auto_on_aiter"] = requested(pool)
    pool.is_draft_worker = True  # an MLA model without a draft of its own
    results["mla_row_elements"] = [shape.row_elements for shape in page_guard_hook._shapes(pool)]
    return {**results, "no_draft_on_aiter": requested(pool)}


if __name__ == "__main__":
    target, draft, *cases = sys.argv[1:]
    sizes = [in_memory(target, *case) for case in json.loads(cases[0])] if cases else guarded(target, draft)
    print("\n" + json.dumps(sizes))

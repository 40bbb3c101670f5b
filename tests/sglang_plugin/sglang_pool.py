"""Run by `support.run_program`: SGLang's own pool sizing with the plugin loaded, for the checkpoints in argv.

Prints, as JSON, the token counts that SGLang settles on for a request of 50 G tokens under several gates.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kimi_w4a8_eagle3.sglang_plugin import page_guard_hook

REQUESTED = 50_000_000_000


def configurator(target: str, draft: str) -> KVCacheConfigurator:
    """The object that sizes the target's pool, with everything that sizing reads and no model behind it."""
    words = "--device cpu --attention-backend intel_amx"
    words += " --trust-remote-code --mem-fraction-static 0.3 --speculative-algorithm EAGLE3 --speculative-num-steps 3"
    words += " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    args = prepare_server_args(["--model-path", target, "--speculative-draft-model-path", draft, *words.split()])
    set_global_server_args_for_scheduler(args)
    owner = object.__new__(KVCacheConfigurator)
    owner.server_args, owner.page_size, owner.is_draft_worker = args, 1, False
    if hasattr(KVCacheConfigurator, "draft_parallel_layout"):  # since 0.5.23
        owner.draft_parallel_layout = None
    owner.kv_cache_dtype = torch.bfloat16
    owner.model_config = ModelConfig.from_server_args(args)
    owner.spec_algorithm = SpeculativeAlgorithm.from_string("EAGLE3")
    owner.spec_aux_config = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=args, model_config=owner.model_config, spec_algorithm=owner.spec_algorithm, is_draft_worker=False
    )
    return owner


def sized(owner: KVCacheConfigurator, **gates: str) -> int:
    for name in ("KIMI_PAGE_GUARD", "KIMI_PAGE_GUARD_INT_MAX"):
        os.environ.pop(name, None)
    os.environ.update(gates)
    return int(owner._apply_token_constraints(REQUESTED))


if __name__ == "__main__":
    pool = configurator(*sys.argv[1:])
    draft_rows = [shape.row_elements for shape in page_guard_hook._shapes(pool) if shape.kind == "mha"]
    results = {
        "requested": REQUESTED,
        "draft_row_elements": draft_rows,
        "auto": sized(pool),
        "off": sized(pool, KIMI_PAGE_GUARD="off", KIMI_PAGE_GUARD_INT_MAX="1000"),
        "force": sized(pool, KIMI_PAGE_GUARD="force"),
        "force_small": sized(pool, KIMI_PAGE_GUARD="force", KIMI_PAGE_GUARD_INT_MAX="128000"),
    }
    page_guard_hook.attention_backends = lambda: {"aiter"}
    results["auto_on_aiter"] = sized(pool)
    pool.is_draft_worker = True  # an MLA model without a draft of its own
    results["mla_row_elements"] = [shape.row_elements for shape in page_guard_hook._shapes(pool)]
    results["no_draft_on_aiter"] = sized(pool)
    print("\n" + json.dumps(results))

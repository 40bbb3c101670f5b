"""Runs a program of SGLang with planted faults: a request whose stop string names a place raises there.

The places are deep inside what SGLang does for one request or one batch, below the hooks of the plugin. Where
KIMI_PLANTED_RANKS names a folder, ranks get logits that differ in the last bit, and each writes its tokens there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kimi_w4a8_eagle3.sglang_plugin import exact_sampling
from kimi_w4a8_eagle3.sglang_plugin.run_module import run

_SCHEDULE = "sglang.srt.managers.schedule_batch"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # SGLang keeps 10 GB, which a machine with other engines may not have


def planted(place: str, req: Any) -> None:
    """Raise where the request asks for it."""
    if place in (req.sampling_params.stop_strs or ()):
        raise TypeError(f"planted: {place}")


def take_in(_: object, req: Any) -> None:
    planted("TAKE-IN", req)


def building(batch: Any, *_: object, **__: object) -> None:
    for req in batch.reqs:
        planted("BUILDING", req)


def forward(_: object, batch: Any, **__: object) -> None:
    for req in batch.reqs:
        planted("PREFILL" if batch.forward_mode.is_extend() else "DECODE", req)


def reading(_: Any, result: Any, batch: Any) -> None:
    for req in batch.reqs:
        planted("READING", req)


def stop_check(req: Any, *_: Any) -> None:
    planted("STOP-CHECK", req)


def output(req: Any) -> None:
    planted("OUTPUT", req)


def answer(_: Any, __: Any, state: Any, *___: Any, **____: Any) -> None:
    if "ANSWER" in (state.obj.sampling_params.get("stop") or ()):
        raise TypeError("planted: ANSWER")


def forget_draft(original: Any, *args: Any, **named: Any) -> None:
    """Load nothing back into a draft's cache while the file exists."""
    if not Path(os.environ.get("KIMI_PLANTED_FORGETTING", "/nowhere")).exists():
        original(*args, **named)


HookRegistry.register(
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer", forget_draft, HookType.AROUND
)


def draw_int32(original: Any, *args: Any) -> Any:
    """Draw what the operator that verifies refuses, while the file exists: every sampled verify step fails."""
    planted = Path(os.environ.get("KIMI_PLANTED_DRAW", "/nowhere")).exists()
    return original(*args).int() if planted else original(*args)


HookRegistry.register("kimi_w4a8_eagle3.sglang_plugin.exact_sampling.draw", draw_int32, HookType.AROUND)


def last_bit(output: Any, processor: Any, *_: object, **__: object) -> None:
    """Move the target's logits by one bit of bfloat16, every second one up, but on rank 0."""
    if get_tp_group().rank_in_group and "Eagle3" not in str(processor.config.architectures):
        logits = output.next_token_logits
        up = torch.arange(logits.numel(), device=logits.device).view_as(logits) % 2 == 0
        ends = torch.where(up, torch.inf, -torch.inf).to(torch.bfloat16)
        logits.copy_(torch.nextafter(logits.to(torch.bfloat16), ends))


def write_tokens(_: None, req: Any, *__: object) -> None:
    with (Path(os.environ["KIMI_PLANTED_RANKS"]) / str(get_tp_group().rank_in_group)).open("a") as file:
        file.write(json.dumps([req.rid, list(req.output_ids)]) + "\n")


if "KIMI_PLANTED_RANKS" in os.environ:
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", last_bit, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULE}.Req.update_finish_state", write_tokens, HookType.AFTER)
if "KIMI_PLANTED_ALONE" in os.environ:  # no rank takes the verified tokens of rank 0
    vars(exact_sampling)["get_tp_group"] = lambda: SimpleNamespace(world_size=1)
for _target, _plant in {
    "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar": take_in,
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": lambda _cls, batch, *_: building(
        batch
    ),
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation": forward,
    f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens": reading,
    f"{_SCHEDULE}.Req._check_str_based_finish": stop_check,
    f"{_SCHEDULE}.Req.init_incremental_detokenize": output,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_logprob_style": answer,
}.items():
    HookRegistry.register(_target, _plant, HookType.BEFORE)

if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])

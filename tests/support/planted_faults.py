"""Runs a program of SGLang with planted faults: a request whose stop string names a place raises there.

The places are deep inside what SGLang does for one request or one batch, below the hooks of the plugin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kimi_w4a8_eagle3.sglang_plugin.run_module import run

_SCHEDULE = "sglang.srt.managers.schedule_batch"
_COMPONENTS = "sglang.srt.managers.scheduler_components"


def planted(place: str, req: Any) -> None:
    """Raise where the request asks for it."""
    if place in (req.sampling_params.stop_strs or ()):
        raise TypeError(f"planted: {place}")


def take_in(_: object, req: Any) -> None:
    planted("TAKE-IN", req)


def building(_: type, batch: Any, *__: object, **___: object) -> None:
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


def draw_int32(original: Any, *args: Any) -> Any:
    """Draw what the operator that verifies refuses, while the file exists: every sampled verify step fails."""
    planted = Path(os.environ.get("KIMI_PLANTED_DRAW", "/nowhere")).exists()
    return original(*args).int() if planted else original(*args)


HookRegistry.register("kimi_w4a8_eagle3.sglang_plugin.decoding.exact_sampling.draw", draw_int32, HookType.AROUND)


def ranks_apart(output: Any, *_: Any, **__: Any) -> None:
    """Give all ranks but the first other logits, so that they choose other tokens."""
    if "KIMI_PLANTED_RANKS" in os.environ and get_tp_group().rank_in_group and output.next_token_logits is not None:
        output.next_token_logits[:, ::2] *= 1.25


if os.environ.get("KIMI_VIRTUAL_NODE") == "1":  # Dynamo looks for it in __main__, which is another module by then
    ranks_apart = torch.compiler.disable(ranks_apart)


def without_wait(scheduler: Any, *_: Any, **__: Any) -> None:
    """Start each step without a wait for the tensors that the scheduler's stream makes."""
    if "KIMI_PLANTED_WAIT" in os.environ:
        scheduler.forward_stream.wait_stream = lambda _: None


HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", without_wait, HookType.BEFORE)
HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", ranks_apart, HookType.AFTER)
for _target, _plant in {
    "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar": take_in,
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": building,
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation": forward,
    f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens": reading,
    f"{_SCHEDULE}.Req._check_str_based_finish": stop_check,
    f"{_SCHEDULE}.Req.init_incremental_detokenize": output,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_logprob_style": answer,
}.items():
    HookRegistry.register(_target, _plant, HookType.BEFORE)

if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])

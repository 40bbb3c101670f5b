"""Adaptive draft steps: refuse what SGLang cannot run, and skip the draft's prefill at 0 steps.

SGLang only warns when it cannot adapt, and serves fixed steps. SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND=1 stops the
draft while decoding at 0 steps, but not its pass over every prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from ..base.errors import KimiError, or_end
from .hooks import Feature

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
FEATURE = Feature(
    "adaptive draft steps",
    remove_when="SGLang refuses what it cannot adapt, and skips the draft's prefill at 0 steps",
    needs=(f"{_WORKER}.EAGLEWorkerV2._stub_skipped_draft_extend",),
)


@FEATURE.after("sglang.srt.speculative.adaptive_spec_params.adaptive_unsupported_reason")
def refuse(reason: str | None, *_: object, **__: object) -> None:
    """End the process with SGLang's own reason against adaptive steps, which SGLang would only log."""
    if reason is not None:
        with or_end("adaptive speculation"):
            raise KimiError(
                f"SGLang cannot choose draft steps by batch size: {reason}",
                where="--speculative-adaptive",
                remedy="serve with options.speculation = 'fixed', or without that argument",
            )


@FEATURE.before(f"{_WORKER}.EAGLEWorkerV2.forward_batch_generation")
def choose_steps(worker: EAGLEWorkerV2, batch: ScheduleBatch, *_: object, **__: object) -> None:
    """Choose a prompt's draft steps by all requests, not by the last decode batch."""
    if batch.forward_mode.is_extend() and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
        rows = worker.target_worker.model_runner.req_to_token_pool  # one row per running or starting request
        worker.activate_step_by_batch(rows.size - rows.available_size())


@FEATURE.around(f"{_WORKER}.EagleDraftWorker._draft_extend_for_prefill")
def skip_prefill(
    original: Callable[..., EagleDraftInput],
    draft: EagleDraftWorker,
    batch: ScheduleBatch,
    hidden: torch.Tensor,
    next_token_ids: torch.Tensor,
    *args: object,
    **named: object,
) -> EagleDraftInput:
    """At 0 steps, return the stub that SGLang uses while decoding."""
    if draft.speculative_num_steps or not envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
        return original(draft, batch, hidden, next_token_ids, *args, **named)
    stub = EagleDraftInput(bonus_tokens=next_token_ids, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
    worker = SimpleNamespace(device=draft.device, topk=draft.topk, draft_worker=draft)
    EAGLEWorkerV2._stub_skipped_draft_extend(worker, batch, SimpleNamespace(next_draft_input=stub))
    return stub

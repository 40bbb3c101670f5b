"""Input-scattered attention with EAGLE3 on ROCm: in a prefill each rank has q_a, kv_a and the norms of its own tokens.

SGLang's `--enable-attn-tp-input-scattered` turns each all-reduce into a reduce-scatter and an all-gather. Between the
two a rank holds an equal share of the rows, padded to a multiple of the ranks. SGLang refuses it on ROCm and with
EAGLE3. These hooks allow it, and mend four things:

- The states that the draft reads are captured from each rank's share, so they are gathered, without the padding.
- KimiK25 passes embeddings that are complete on every rank, where SGLang sums them: only rank 0's are counted.
- SGLang adds the residual to the bfloat16 partial sum of the rank that owns a row, so the result depends on the owner.
  Here the sum is complete before the residual is added, as without the argument.
- Attention computes real rows only. What memory holds in the padding rows must not reach the router as NaN.

Plain decoding, verification and the draft compute as before. On a CPU the answers are bit for bit those without the
argument. On GPUs they may differ in rounding: a product of fewer rows may take another tile, and a reduce-scatter may
sum in another order than an all-reduce. By the account (docs/perf/machine-model.md) it saves 64 of the 412 ms of a
prefill of 10,240 tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.models import deepseek_v2

from ..hooks import Feature, first_of

if TYPE_CHECKING:
    from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)
FEATURE = Feature(
    "input-scattered attention",
    remove_when="SGLang's --enable-attn-tp-input-scattered serves EAGLE3 on ROCm, counts a picture's embeddings once "
    "(sglang#21301) and adds the residual after the sum",
    optional=True,
)
_LAYERS = "sglang.srt.layers"
_CONTEXT = first_of(  # 0.5.23 moved what 0.5.20 had in one module
    f"{_LAYERS}.layer_boundary.adapters.attention.AttnTpContext.use_input_scattered",
    f"{_LAYERS}.communicator.AttnTpContext.use_input_scattered",
)
_SUM = first_of(
    f"{_LAYERS}.layer_boundary.prepare._tp_all_reduce_with_scattered_residual",
    f"{_LAYERS}.communicator.CommunicateWithAllReduceAndLayerNormFn._tp_all_reduce_with_scattered_residual",
)
_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # subclasses override what the hooks rely on

_inner_norms: set[int] = set()  # ids of the norms after attention, of all layers but the last
_rows: list[int] = [0]  # of the prefill by shares that is running, without its padding; otherwise 0


@FEATURE.after("sglang.srt.model_executor.model_runner.ModelRunner.load_model")
def allow(_: None, runner: ModelRunner) -> None:
    """Allow it for the target, or say why the engine serves without it."""
    if runner.is_draft_worker or not runtime_context.get_parallel().enable_attn_tp_input_scattered:
        return
    target = getattr(runner.model, "language_model", runner.model)
    reason = reason_against(target)
    deepseek_v2.get_attn_tp_context().allow_input_scattered = reason is None
    if reason is None:
        _inner_norms.update(id(layer.post_attention_layernorm) for layer in target.model.layers[:-1])
        logger.info("each rank of %d computes its share of a prefill's tokens", get_tp_group().world_size)
    else:
        FEATURE.leave_out(reason, say=not get_tp_group().rank_in_group)


def reason_against(target: Any) -> str | None:
    """Return what of the model or the layout does not go with it; None if all does."""
    parallel, name = runtime_context.get_parallel(), type(target).__name__
    if name not in _MODELS:
        return f"the model is {name}"
    reasons = {
        "its queries have no low-rank projection (q_lora_rank)": target.config.q_lora_rank is None,
        "its attention is sparse (DSA)": target.use_dsa,
        "there is one rank": parallel.tp_size == 1,
        "ranks hold different layers (--pp-size)": parallel.pp_size > 1,
        "ranks hold different experts (--ep-size)": parallel.moe_ep_size > 1 or not get_moe_a2a_backend().is_none(),
        "attention is parallel over requests (--enable-dp-attention)": is_dp_attention_enabled(),
        "dense layers are not shared by all ranks (--moe-dense-tp-size)": parallel.moe_dense_tp_size is not None,
        "a context is shared by ranks (--attn-cp-size)": parallel.attn_cp_size > 1,
        "prefills run as graphs; pass --disable-prefill-cuda-graph": not check_cuda_graph_backend(
            Phase.PREFILL, Backend.DISABLED
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@FEATURE.around(_CONTEXT)
def use_input_scattered(original: Callable[..., bool], context: object, forward_batch: ForwardBatch) -> bool:
    """Leave the draft's prefill alone: a draft with MLA would take all rows for its share."""
    return forward_batch.spec_info is None and original(context, forward_batch)


@FEATURE.around("sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.forward")
def forward(
    original: Callable[..., object],
    model: deepseek_v2.DeepseekV2ForCausalLM,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    input_embeds: torch.Tensor | None = None,
    *args: object,
    **named: object,
) -> object:
    """Count embeddings that are complete on every rank once in the sum over the ranks.

    The draft reads them, too, of real tokens only.
    """
    # The first two conditions let a verify step pass in a microsecond.
    context = _inner_norms and forward_batch.spec_info is None and deepseek_v2.get_attn_tp_context()
    if not context or not context.use_input_scattered(forward_batch):
        return original(model, input_ids, positions, forward_batch, input_embeds, *args, **named)
    rows = _rows[0] = forward_batch.extend_num_tokens
    if forward_batch.mm_input_embeds is not None:
        forward_batch.mm_input_embeds = forward_batch.mm_input_embeds[:rows]
    if input_embeds is not None and get_tp_group().rank_in_group:
        input_embeds = torch.zeros_like(input_embeds)
    try:
        return original(model, input_ids, positions, forward_batch, input_embeds, *args, **named)
    finally:
        _rows[0] = 0


@FEATURE.around(_SUM)
def sum_then_add_residual(
    original: Callable[..., object],
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.nn.Module,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Complete the sum of attention's output on each rank's share, add the residual, normalize, and gather.

    A rank reads only its own share of the residual, so the others' are gathered only for the norm after the last layer.
    """
    if not len(hidden_states):
        return hidden_states, hidden_states
    clear_padding(hidden_states)
    group = get_tp_group()
    share = torch.empty_like(hidden_states[: len(hidden_states) // group.world_size])
    group.reduce_scatter_tensor(share, hidden_states)
    share, residual = norm(share, residual)
    group.all_gather_into_tensor(hidden_states, share)
    all_rows = torch.empty_like(hidden_states)
    if id(norm) in _inner_norms:
        all_rows.tensor_split(group.world_size)[group.rank_in_group].copy_(residual)
    else:
        group.all_gather_into_tensor(all_rows, residual)
    return hidden_states, all_rows


def clear_padding(hidden_states: torch.Tensor) -> None:
    """Set the rows to zero that attention left as they were in memory. Other batches have none."""
    if _rows[0]:
        hidden_states[_rows[0] :] = 0


@FEATURE.after("sglang.srt.layers.aux_hidden_states.AuxHiddenStatePacker.finalize")
def gather_captured(share: torch.Tensor, _: AuxHiddenStatePacker) -> torch.Tensor | None:
    """Gather the states of all captured layers at once, for the draft."""
    if not _rows[0]:
        return None  # no share: the result stays
    group = get_tp_group()
    states = share.new_empty((len(share) * group.world_size, *share.shape[1:]))
    group.all_gather_into_tensor(states, share)
    return states[: _rows[0]]

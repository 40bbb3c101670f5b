"""Sampling, penalties and verification that give a request the same tokens with and without EAGLE3.

SGLang verifies by argmax on ROCm and CPUs, ignores seeds, and feeds one token per verify step to its penalizers. Here
the target draws its own token at every verified position (`sampling/draw.py`), with the noise and the penalties of
that position. A draft token is kept while it equals the draw. This is exact for any draft and needs no draft
probabilities. Plain decoding and prefill draw with the same function, so the same seed gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN
from sglang.srt.utils.async_probe import sanitize_nan_logits

from ...base.errors import KimiError, or_end
from ...sampling.draw import Filters, draw
from ...sampling.penalties import CountTable, Penalized, Penalties
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

_VERIFY = "sglang.srt.speculative.eagle_utils.eagle_sample"
FEATURE = Feature(
    "exact sampling",
    remove_when="SGLang verifies sampled requests on ROCm (sglang#31214) with penalties (sglang#33643) and seeds",
    needs=(
        "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
        "sglang.srt.speculative.eagle_worker_common.eagle_sample",
    ),
)

_tables: WeakKeyDictionary[ReqToTokenPool, CountTable] = WeakKeyDictionary()
_scanned: list[Any] = [None, 0, False]  # requests of the latest batch, their number, and True if one is penalized
_latest: WeakKeyDictionary[ReqToTokenPool, tuple[tuple[object, ...], Penalties]] = WeakKeyDictionary()


@FEATURE.before("sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.__init__")
def require_known_verification(*_: object, **__: object) -> None:
    """Refuse trees, and another plugin's verification."""
    with or_end("speculation cannot be verified"):
        if (topk := runtime_context.get_spec().speculative_eagle_topk) != 1:
            raise KimiError(
                f"drafts are verified as a chain, and --speculative-eagle-topk {topk} makes a tree",
                where="--speculative-eagle-topk",
                expected="1",
                remedy="serve without this argument: every recipe has topk 1",
            )
        if eagle_worker_common.eagle_sample is not eagle_utils.eagle_sample:
            raise KimiError(
                "SGLang's EAGLE worker calls another verification than the plugin's",
                where="sglang.srt.speculative.eagle_worker_common.eagle_sample",
                expected=_VERIFY,
                remedy="remove the plugin or patch that replaces it (SGLANG_PLUGINS names what is loaded)",
            )


@FEATURE.after("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch")
def set_seeds(info: SamplingBatchInfo, _: type, batch: ScheduleBatch, *__: object, **___: object) -> None:
    """Set one seed per request, which SGLang filters and merges with the batch.

    A request without a seed gets one from its id, which is random and the same on every rank. With deterministic
    inference SGLang has set the seeds already.
    """
    if info.sampling_seed is None:
        seeds = [_seed(req) for req in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.device)


def _seed(req: Req) -> int:
    seed = req.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(blake2b(req.rid.encode(), digest_size=8).digest(), "little")
    return (seed + 2**63) % 2**64 - 2**63  # any integer to int64


@FEATURE.around("sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__")
def without_penalizers(
    original: Callable[..., None],
    owner: BatchedPenalizerOrchestrator,
    vocab_size: int,
    batch: ScheduleBatch,
    penalizers: object = (),
) -> None:
    """Disable SGLang's own penalizers, which `Penalties` replaces."""
    original(owner, vocab_size, batch, set())


@FEATURE.before("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation")
def keep_penalties(_: TpModelWorker, batch: ScheduleBatch | None, *__: object, **___: object) -> None:
    """Attach the penalties to a pass that draws by `ModelRunner.sample`. A verify step comes without its batch."""
    if batch is not None:
        batch.sampling_info.kimi_penalties = penalties_of(batch, batch.sampling_info.vocab_size)


def penalties_of(batch: ScheduleBatch, vocab_size: int) -> Penalties | None:
    """Return the penalties of a ScheduleBatch, or None when no request has any.

    A batch with the same penalized requests at the same places as the pass before gets the same object.
    """
    if not _any_penalized(batch.reqs):
        return None
    mine = [(row, req) for row, req in enumerate(batch.reqs) if _is_penalized(req.sampling_params)]
    pool = batch.req_to_token_pool
    if pool not in _tables:
        _tables[pool] = CountTable(vocab_size, pool.req_to_token.device)
    placed = [(row, req, *_tables[pool].row(req)) for row, req in mine]
    key = tuple((row, req.rid, counts) for row, req, counts, _ in placed)
    # A prefill rebuilds the state: its request is new, was retracted, or is read in chunks whose draws are dropped.
    prefill = batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify()
    if prefill or any(new for *_, new in placed) or _latest.get(pool, ((), None))[0] != key:
        decoding = (batch.decoding_reqs or ()) if prefill else batch.reqs
        requests = [_penalized(req, row, counts, new or req not in decoding) for row, req, counts, new in placed]
        _latest[pool] = key, Penalties(_tables[pool], requests)
    return _latest[pool][1]


def _any_penalized(reqs: list[Req]) -> bool:
    """Return True if a request has penalties, looked for once: SGLang makes a new list for other requests."""
    if _scanned[0] is not reqs or _scanned[1] != len(reqs):
        _scanned[:] = reqs, len(reqs), any(_is_penalized(req.sampling_params) for req in reqs)
    return bool(_scanned[2])


def _is_penalized(params: SamplingParams) -> bool:
    neutral = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    return not neutral or params.min_new_tokens > 0


def _penalized(req: Req, row: int, counts: int, restored: bool) -> Penalized:
    params, tokenizer = req.sampling_params, req.tokenizer
    stops = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if tokenizer is not None:
        stops |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
    return Penalized(
        row=row,
        counts=counts,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        repetition=params.repetition_penalty,
        min_new=params.min_new_tokens,
        prompt=len(req.origin_input_ids),
        stops=sorted(stops - {None}),
        produced=list(req.output_ids) if restored else None,
    )


@FEATURE.around("sglang.srt.model_executor.model_runner.ModelRunner.sample")
def sample(
    original: Callable[..., torch.Tensor],
    runner: ModelRunner,
    logits_output: LogitsProcessorOutput,
    forward_batch: ForwardBatch,
) -> torch.Tensor:
    """Draw for plain decoding and for every prefill, after the penalties."""
    penalties: Penalties | None = forward_batch.sampling_info.kimi_penalties
    if penalties is not None:
        positions = forward_batch.positions if forward_batch.forward_mode.is_decode() else forward_batch.seq_lens - 1
        penalties.apply(logits_output.next_token_logits, positions)
    tokens = original(runner, logits_output, forward_batch)
    _agree(tokens)
    if penalties is not None:
        penalties.count(tokens)
    return tokens


def _agree(tokens: torch.Tensor) -> None:
    """Take rank 0's tokens: ranks whose logits differ in the last bit would draft or draw others.

    With the same drafts and draws every rank accepts the same.
    """
    group = _ranks()
    if group.world_size > 1 and tokens.numel():  # an idle group of DP attention has no tokens
        group.broadcast(tokens, src=0)


@cache
def _ranks() -> GroupCoordinator:
    return runtime_context.get_parallel().attn_tp_group if is_dp_attention_enabled() else get_tp_group()


@FEATURE.before("sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify")
def agree_on_drafts(_: EAGLEWorkerV2, batch: ScheduleBatch, *__: object, **___: object) -> None:
    """Let the target read the same drafts on every rank, because the KV of a draft is made of all ranks' sums."""
    drafts = batch.spec_info.draft_token
    # Without the overlap schedule a step with no drafts has int32 tokens (0.5.20), and the operator takes int64 alone.
    if drafts.dtype != torch.int64:
        drafts = batch.spec_info.draft_token = drafts.long()
    _agree(drafts)


@FEATURE.after("sglang.srt.layers.sampler.Sampler.__init__")
def round_as_verification(_: None, sampler: Sampler, *__: object, **___: object) -> None:
    """Use torch's softmax and log_softmax, as verification does.

    SGLang does so only for deterministic inference; otherwise its logprobs are logarithms of rounded probabilities.
    """
    sampler.enable_deterministic = True


@FEATURE.around("sglang.srt.layers.sampler.Sampler._sample_from_probs")
def sample_from_probs(
    original: Callable[..., tuple[torch.Tensor, object]],
    sampler: Sampler,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple: bool,
) -> tuple[torch.Tensor, object]:
    """Draw with the requests' seeds; SGLang itself draws when a request asks for the sampling mask."""
    if info.sampling_mask_batch_indices is not None:
        return original(sampler, probs, info, positions, simple)
    drawn = draw(probs, _filters(info), info.sampling_seed, positions.long())
    if info.grammars:  # SGLang would take the least of the ranks' tokens, and verification takes rank 0's
        _agree(drawn)
    return drawn, None


def _filters(info: SamplingBatchInfo) -> Filters:
    active = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    return Filters(info.top_ks, info.top_ps, info.min_ps, active)


@FEATURE.around(_VERIFY)
def verify(
    original: Callable[..., tuple[torch.Tensor, ...]],
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: GrammarMask | None = None,
    **named: object,
) -> tuple[torch.Tensor, ...]:
    """Return predict, accept lengths and accept indices as SGLang does.

    SGLang itself verifies greedy batches without penalties and grammars, and benchmarks with a simulated accept length.
    It masks after it replaces infinities, so a masked token would have another logprob than in plain decoding.
    """
    info = batch.sampling_info
    plain = info.is_all_greedy and grammar_mask is None and not _any_penalized(batch.reqs)
    if plain or SIMULATE_ACC_LEN > 0 or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, **named)
    penalties = penalties_of(batch, info.vocab_size)
    logits, n = logits_output.next_token_logits, verify_input.draft_token_num
    chains = verify_input.draft_token.view(-1, n)
    _transform(logits, info, grammar_mask, penalties, verify_input.positions, chains)
    drawn = logits.argmax(dim=-1) if info.is_all_greedy else _draw_all(logits, info, verify_input.positions, n)
    _agree(drawn)
    predict, lengths, index = _accept(verify_input, drawn.view(-1, n), chains)
    if penalties is not None:
        penalties.count(torch.where(index >= 0, predict[index.long().clamp(min=0)], -1))
    return predict, lengths, index


def _transform(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    grammar_mask: GrammarMask | None,
    penalties: Penalties | None,
    positions: torch.Tensor,
    chains: torch.Tensor,
) -> None:
    """Change the logits in place, in the order of plain decoding; compute_spec_logprobs reads them afterwards."""
    if penalties is not None:
        penalties.apply(logits, positions, chains)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(chains.shape[1], dim=0))
    sanitize_nan_logits(logits, "verify: target model logits")


def _draw_all(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, n: int) -> torch.Tensor:
    """Draw at each of the n positions of every request, from probabilities made as the sampler makes them."""
    probs = torch.softmax(logits / info.temperatures.repeat_interleave(n, dim=0), dim=-1)
    return draw(probs, _filters(info).repeated(n), info.sampling_seed.repeat_interleave(n), positions.long())


def _accept(verify_input: EagleVerifyInput, drawn: torch.Tensor, chains: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keep each chain while it equals the draws, with SGLang's greedy operator."""
    batch, device = len(chains), chains.device
    predict, index, correct = eagle_utils.verify_tree_greedy_func(
        predicts=torch.zeros(chains.numel(), dtype=torch.int32, device=device),
        accept_index=torch.full((batch, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(batch, dtype=torch.int32, device=device),
        candidates=chains,
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=drawn,
        topk=verify_input.tree_topk,
    )
    return predict, correct + 1, index

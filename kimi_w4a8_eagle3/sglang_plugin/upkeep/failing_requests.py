"""A request that raises inside SGLang's scheduler ends alone with a 500, where SGLang itself would end the engine.

The hooks differ by what is known when something raises:
- Taking in a request: it holds nothing yet, so it is dropped and answered.
- Its own part of a result (stop checks, logprobs, output): the request is known and ends through SGLang's own path.
- Building, running or sampling a batch, and the rest of its result: the cause is unknown, so all requests of the batch
  end. Their KV is released, and SGLang's own check of the pool must then add up.
- With DP attention every group of ranks has a batch of its own. A batch that cannot be built ends before the groups
  meet, and its group takes part in the pass with an idle batch. When a pass raises, the other groups wait inside its
  collectives, so the process ends.
- Everything else ends the process as before: errors of the machine, of the pools or of one rank only, and an engine in
  which one kind of batch fails again and again (`repeated_failures`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from http import HTTPStatus
from inspect import signature
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation import utils as disaggregation
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import GenerationBatchResult, is_health_check_generate_req
from sglang.srt.mem_cache import common as mem_cache
from sglang.srt.runtime_context import get_parallel

from ...engine.given_folder import SENT
from ..hooks import Feature
from .failing_outputs import OF_CONTENT, reason_of
from .pulse_hook import leave
from .repeated_failures import RepeatedFailures, count, features_of, mode_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

logger = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_RESULTS = "sglang.srt.managers.scheduler_components"
_PROCESSOR = f"{_RESULTS}.batch_result_processor.SchedulerBatchResultProcessor"
_CHECKER = f"{_RESULTS}.invariant_checker.SchedulerInvariantChecker"
_POOLS = "sglang.srt.mem_cache"

_OF_THE_MACHINE = (  # AcceleratorError: since torch 2.8
    torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError), torch.distributed.DistError,
)  # fmt: skip
_OF_THE_DEVICE = ("HIP error", "CUDA error", "hipError", "cudaError")
_RANKS_AGREE_S = 10.0  # if all ranks fail, they do so within one forward pass
_MAX_FAILED_BATCHES = 50  # in a row; long before, the supervisor's canary tells bad requests from a broken engine

_EMPTY = {"type": "abort", "message": "the prompt is empty", "status_code": 400, "err_type": "BadRequestError"}
_failures = RepeatedFailures()
_schedulers: list[Scheduler] = []  # this process's scheduler, for hooks that do not get it as an argument

FEATURE = Feature(
    "schedulers that outlive a failing request",
    remove_when="a request that raises in SGLang's scheduler ends alone",
    needs=(
        f"{_SCHEDULER}._release_aborted_request",
        f"{_CHECKER}._check_full_pool",
        f"{_CHECKER}._get_total_uncached_sizes",
        "sglang.srt.disaggregation.utils.prepare_abort",
        "sglang.srt.mem_cache.common.release_kv_cache",
    ),
    # When no token is left, because none can follow the grammar or `min_tokens` forbids the last one, all logits of a
    # row are infinite and its probabilities NaN, and sampling raises for the whole batch. SGLang's own switch makes
    # them finite: it draws one token, which the grammar of that request alone then refuses.
    environ={"SGLANG_SANITIZE_NAN_LOGITS": "1"},
    optional=True,
)


@FEATURE.around(f"{_SCHEDULER}.handle_generate_request")
def take_in(
    original: Callable[..., None], scheduler: Scheduler, recv_req: TokenizedGenerateReqInput, **named: object
) -> None:
    """Drop a request that raises while it is in no batch and has no KV yet, and one without a token to begin with.

    A pass over no token raises in the model, where SGLang's state of that request no longer adds up.
    """
    _schedulers[:] = [scheduler]
    if recv_req.input_embeds is None and not len(recv_req.input_ids or ()):
        _answer(scheduler, recv_req, _EMPTY)
        return
    try:
        original(scheduler, recv_req, **named)
    except OF_CONTENT as error:
        # A session keeps track of its requests; the gateway sends none.
        if recv_req.session_params is not None or not _request_failed(error):
            raise
        for queue in (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue):
            queue[:] = [req for req in queue if req.rid != recv_req.rid]
        _log(error, [recv_req.rid], "it was received", "intake")
        _answer(scheduler, recv_req, reason_of(error))


@FEATURE.around(
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    f"{_PROCESSOR}._apply_decode_logprobs",
    f"{_RESULTS}.logprob_result_processor.SchedulerLogprobResultProcessor.add_logprob_return_values",
)
def own_part(original: Callable[..., object], *args: object, **named: object) -> object:
    """End the request whose own part of a result raises: its stop checks or its logprobs."""
    try:
        return original(*args, **named)
    except OF_CONTENT as error:
        if not _request_failed(error):
            raise
        _fail(next(value for value in (*args, *named.values()) if hasattr(value, "finished_reason")), error)
        return None


@FEATURE.around(f"{_RESULTS}.output_streamer._GenerationStreamAccumulator.accept")
def accept(original: Callable[..., None], rows: _GenerationStreamAccumulator, *, req: Req) -> None:
    """Add a request's output to many parallel lists, or fail it.

    The output of a failed request may be inconsistent, so the client gets only the reason.
    """
    if not getattr(req, "kimi_failed", False):
        before = len(rows.rids)
        try:
            original(rows, req=req)
            if not before and rows.rids:  # once per message to the detokenizer
                leave(SENT)
            return
        except OF_CONTENT as error:
            if not _request_failed(error):
                raise
            _take_back(rows, before)
            _fail(req, error)
    if req.finished():
        req.finished_output = True
        _answer(_schedulers[-1], req, req.finished_reason.to_json())


@FEATURE.around(f"{_BATCH}.prepare_for_extend", f"{_BATCH}.prepare_for_decode")
def prepare(original: Callable[..., None], batch: ScheduleBatch, *args: object, **named: object) -> None:
    """Keep the error of a batch that cannot be built for `run_batch`."""
    try:
        original(batch, *args, **named)
    except OF_CONTENT as error:
        if not _request_failed(error):
            raise
        batch.kimi_error = error


@FEATURE.around(f"{_RESULTS}.dp_attn.SchedulerDPAttnAdapter.prepare_mlp_sync_batch")
def meet(
    original: Callable[..., ScheduleBatch | None], adapter: object, batch: ScheduleBatch | None
) -> ScheduleBatch | None:
    """End a batch that could not be built before the groups of DP attention tell each other their tokens."""
    error = getattr(batch, "kimi_error", None)
    if batch is None or error is None:
        return original(adapter, batch)
    _end_batch(_schedulers[-1], batch, error, "their batch was built")
    return original(adapter, None)


@FEATURE.around(f"{_SCHEDULER}.run_batch")
def run_batch(
    original: Callable[..., GenerationBatchResult],
    scheduler: Scheduler,
    batch: ScheduleBatch,
    *args: object,
    **named: object,
) -> GenerationBatchResult:
    """End a batch whose forward or sampling raises.

    SGLang then restores the batch's own fields (`_forward_isolation`).
    """
    error = getattr(batch, "kimi_error", None)  # set by `prepare`
    if error is None:
        try:
            return original(scheduler, batch, *args, **named)
        except OF_CONTENT as raised:
            if not _request_failed(raised) or get_parallel().attn_dp_size > 1:
                raise
            error = raised
    _end_batch(scheduler, batch, error, "their batch ran")
    ended = GenerationBatchResult(grammar_advanced=True)  # for the overlap loop, which reads results one step later
    ended.kimi_ended = True
    return ended


@FEATURE.around(f"{_SCHEDULER}.process_batch_result")
def process_batch_result(
    original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
) -> None:
    """End a batch whose result raises while SGLang processes it."""
    if getattr(result, "kimi_ended", False):
        scheduler.maybe_send_health_check_signal()
        return
    try:
        original(scheduler, batch, result)
    except OF_CONTENT as error:
        if not _request_failed(error):
            raise
        _end_batch(scheduler, batch, error, "their results were processed")
    else:
        _failures.passed(batch)


@FEATURE.after(f"{_PROCESSOR}._accept_grammar_tokens", f"{_PROCESSOR}._apply_prefill_grammar")
def refuse_dead_grammar(_: object, __: object, req: Req, *___: object, **____: object) -> None:
    """Answer 400 when the grammar allows no further token.

    SGLang 0.5.20 aborts such a request without a status, and the client takes that for an answer.
    """
    if isinstance(req.to_finish, FINISH_ABORT) and req.to_finish.status_code is None:
        why = "no token can follow what the grammar of this request demands"
        req.to_finish = FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _end_batch(scheduler: Scheduler, batch: ScheduleBatch, error: Exception, when: str) -> None:
    """Answer every open request of a batch and release its KV; raise `error` where that may not be safe."""
    batch.kimi_error = None
    in_a_row = _failures.failed(mode_of(batch), features_of(batch), type(error).__name__)
    if in_a_row >= _MAX_FAILED_BATCHES or not _is_simple(scheduler, batch):
        raise error
    allocator = scheduler.token_to_kv_pool_allocator
    if getattr(allocator, "free_group", None) is not None:
        allocator.free_group_end()
    _log(error, [req.rid for req in batch.reqs], when, mode_of(batch))
    for req in batch.reqs:
        _end(scheduler, req, error)
    _require_pool_adds_up(scheduler, error)


def _end(scheduler: Scheduler, req: Req, error: Exception) -> None:
    finished = req.finished()
    if finished and req.finished_output:
        return
    answered = _whole_answer(scheduler, req)
    if not answered:
        disaggregation.prepare_abort(req, reason_of(error)["message"], reason_of(error)["status_code"])
    req.to_finish = None
    req.finished_output = True
    scheduler._release_aborted_request(req)
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    if req.kv.holds_kv:
        _release_kv(req, scheduler.tree_cache)
    elif not finished:  # it raised after the prefix match and before its first page
        _unlock(req, scheduler.tree_cache)
    if not answered:
        _answer(scheduler, req, reason_of(error))


def _release_kv(req: Req, tree: BasePrefixCache) -> None:
    """Release a request's KV and its lock on the prefix cache, which keeps nothing of it."""
    release = mem_cache.release_kv_cache
    keep = "checkpoint" if "checkpoint" in signature(release).parameters else "is_insert"  # 0.5.23, 0.5.20
    release(req, tree, **{keep: False})


def _unlock(req: Req, tree: BasePrefixCache) -> None:
    """Release only the request's lock on the prefix cache, if it has one."""
    if not hasattr(req, "lock"):  # 0.5.20
        if req.lock_receipt.node_id is not None:
            tree.dec_lock_ref(req.last_node, req.lock_receipt)
            req.lock_receipt = type(req.lock_receipt)()
    elif req.lock is not None:
        tree.unlock(req.lock)
        req.lock = None


def _whole_answer(scheduler: Scheduler, req: Req) -> bool:
    """Send an answer that was complete before another request raised; return False when there is none."""
    if not req.finished() or _failed(req) or req.kv.holds_kv:
        return False
    scheduler.output_streamer.stream_output([req], req.return_logprob)
    return not _failed(req)


def _answer(scheduler: Scheduler, req: Req | TokenizedGenerateReqInput, reason: dict[str, Any]) -> None:
    """Send the reason to the process that holds the client's connection. A health check gets no answer: it failed."""
    if not is_health_check_generate_req(req):
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid, finished_reason=reason), req)


def _is_simple(scheduler: Scheduler, batch: ScheduleBatch) -> bool:
    """Return True for the kind of engine that the recipes start, whose state these hooks know how to clean up."""
    special = (
        scheduler.disaggregation_mode.name != "NULL",
        get_parallel().pp_size > 1,
        scheduler.enable_pdmux,
        scheduler.enable_hisparse,
        scheduler.dllm_config is not None,
        scheduler.tree_cache.supports_mamba(),
        any(req.beam_group is not None or req.session is not None for req in batch.reqs),
    )
    return not any(special)


def _require_pool_adds_up(scheduler: Scheduler, error: Exception) -> None:
    """Raise `error` unless free, cached and owned tokens add up to the pool, by SGLang's own strict-mode check."""
    checker = scheduler.invariant_checker
    # SGLang's count reads the last batch, and there is none if the engine was idle before this one.
    owned = 0 if scheduler.last_batch is None else checker._get_total_uncached_sizes()[0]
    leak, message = checker._check_full_pool(scheduler.pool_stats_observer.get_pool_stats(), uncached=owned)
    if leak:
        logger.error("the KV pool does not add up after a failed batch: %s", message)
        raise error


def _request_failed(error: BaseException) -> bool:
    """Return False for errors of the machine, of the pools or of one rank, which must end the engine."""
    if isinstance(error, _OF_THE_MACHINE) or any(text in str(error) for text in _OF_THE_DEVICE):
        return False
    return not _in_pools(error) and _all_ranks_failed()


def _in_pools(error: BaseException) -> bool:
    """Return True if the error came out of the code that allocates and frees KV, whose state is then unknown."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(module.startswith(_POOLS) for module in modules)


def _all_ranks_failed() -> bool:
    """Return True if all ranks that hold this request failed on it: those of one group with DP attention.

    A rank that continued alone would leave the others waiting.
    """
    group = get_attn_tp_group()
    if group.world_size == 1:
        return True
    try:
        torch.distributed.monitored_barrier(group.cpu_group, timeout=timedelta(seconds=_RANKS_AGREE_S))
    except RuntimeError as error:
        logger.error("only this rank failed, so the engine cannot go on: %s", error)
        return False
    return True


def _fail(req: Req, error: Exception) -> None:
    """Let SGLang end the request in its next check, or change the reason if the request had just finished."""
    _log(error, [req.rid], "its result was processed", "result")
    req.kimi_failed = True
    reason = reason_of(error)
    if req.finished():
        disaggregation.prepare_abort(req, reason["message"], reason["status_code"])
    else:
        req.to_finish = FINISH_ABORT(reason["message"], reason["status_code"], reason["err_type"])


def _failed(req: Req) -> bool:
    return getattr(req, "kimi_failed", False)


def _take_back(rows: _GenerationStreamAccumulator, count: int) -> None:
    """Cut the parallel lists back to the first `count` requests."""
    for field in fields(rows):
        value = getattr(rows, field.name)
        for rows_of_field in (value,) if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
            if isinstance(rows_of_field, list):
                del rows_of_field[count:]


def _log(error: Exception, rids: list[str], when: str, place: str) -> None:
    """Log the error in each rank, and count the requests once."""
    if get_attn_tp_group().rank_in_group == 0:
        count(len(rids), place, error)
    logger.error("%d request(s) end with HTTP 500, which raised while %s: %s", len(rids), when, rids, exc_info=error)

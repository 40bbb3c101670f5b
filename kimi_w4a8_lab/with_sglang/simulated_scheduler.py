"""SGLang's scheduling policy and radix cache without an engine, for simulations of traffic.

SGLang's own classes decide which requests are prefilled, in which chunks, and what the prefix cache keeps: Req,
SchedulePolicy, PrefillAdder, PrefillDelayer, RadixCache, NewTokenRatioTracker and the token allocator. The scheduler's
loop around them needs a device, so SimulatedScheduler is a model of it: it merges finished prefills into the running
batch, lets answers grow, and retracts requests when the pool is full.

All lengths are in units of some tokens, so that a prompt of 100,000 tokens does not need as many numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.prefill_delayer import (
    PrefillDelayer,
    PrefillDelayerSinglePassExecutor,
    RecentPrefillBatchSizeTracker,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import get_schedule, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of one scheduler, in units.

    eagle: keys of the cache are pairs of units, as with EAGLE drafts. max_queued: requests that wait, at most.
    """

    pool: int
    chunk: int
    max_prefill: int
    max_running: int
    max_queued: int
    prefix_cache: bool = True
    eagle: bool = False


@dataclass(eq=False)
class SimulatedRequest:
    """Request in the scheduler. tag: the caller's object. extend: (new, past) units of the current prefill."""

    req: Any
    answer: array[int]
    tag: Any
    protected: int = 0  # units that the tree owns
    held: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # units of its own
    extend: tuple[int, int] = (0, 0)
    cached: int = -1

    @property
    def length(self) -> int:
        return len(self.req.origin_input_ids) + len(self.req.output_ids)


@cache
def _configure() -> None:
    """Give SGLang a configuration, from which its classes read that features are off."""
    publish(ServerArgs(model_path="none", device="cpu"), role="scheduler")


class SimulatedScheduler:
    """Scheduler of one rank of an engine."""

    def __init__(self, limits: SchedulerLimits) -> None:
        _configure()
        self.limits = limits
        self.pool = TokenToKVPoolAllocator(limits.pool, torch.int64, "cpu", None, False)
        params: Any = CacheInitParams(not limits.prefix_cache, None, self.pool, 1, is_eagle=limits.eagle)
        self.tree: Any = RadixCache(params)
        self.policy = SchedulePolicy("fcfs", self.tree, False, False, False)
        start = envs.SGLANG_INIT_NEW_TOKEN_RATIO.get()
        least = start * envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get()
        decay = (start - least) / envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get()
        self.ratio: Any = NewTokenRatioTracker(init=start, min=least, decay=decay, current=start)
        self.waiting: list[SimulatedRequest] = []
        self.reqs: list[Any] = []  # of the running batch, as PrefillAdder reads it
        self.running: list[SimulatedRequest] = []
        self.batch: list[SimulatedRequest] = []  # in prefill
        self.chunked: SimulatedRequest | None = None
        self.full = False
        self.sizes = RecentPrefillBatchSizeTracker()  # of prefill batches, for the delayer
        self._requests: dict[int, SimulatedRequest] = {}

    def batch_size(self) -> int:
        """Return the size of the running batch, for PrefillAdder."""
        return len(self.reqs)

    @property
    def units(self) -> int:
        """Units of all requests, waiting or not."""
        return sum(request.length for request in self._requests.values())

    def add(self, name: str, prompt: array[int], answer: array[int], tag: Any) -> bool:
        """Queue a request whose answer will have the units of `answer`; return False if the queue is full."""
        if len(self.waiting) >= self.limits.max_queued:
            return False
        sampling = SamplingParams(max_new_tokens=len(answer), ignore_eos=True)
        request = SimulatedRequest(Req(name, None, prompt, sampling), answer, tag)
        self._requests[id(request.req)] = request
        self.waiting.append(request)
        return True

    def plan_prefill(self, delayed: PrefillDelayerSinglePassExecutor | None = None) -> list[SimulatedRequest]:
        """Choose the next prefill batch; empty if the running batch should decode.

        delayed: SGLang's PrefillDelayerSinglePassExecutor, which may refuse new requests.
        """
        if (self.full or not self.waiting) and self.chunked is None:
            return []
        if len(self.running) >= self.limits.max_running and self.chunked is None:
            self.full = True
            return []
        queue = [request.req for request in self.waiting]
        self.policy.calc_priority(queue)
        batch: Any = self  # PrefillAdder reads its size and requests
        adder = PrefillAdder(
            1,
            self.tree,
            self.pool,
            batch,
            self.ratio.current,
            self.limits.max_prefill,
            self.limits.chunk,
            max_prefill_bs=self.sizes.max_prefill_bs,
            max_running_requests=self.limits.max_running,
            prefill_delayer_single_pass=delayed,
            waiting_queue_len=len(queue),
        )
        had_chunk = self.chunked is not None
        if self.chunked is not None:
            self.chunked.req.init_next_round_input()
            if adder.add_chunked_req(self.chunked.req) is None:
                self.chunked = None
        for req in queue:
            if len(self.running) + len(adder.can_run_list) >= self.limits.max_running:
                self.full = True
                break
            req.init_next_round_input(self.tree)
            found = adder.add_one_req(req, has_chunked_req=had_chunk, truncation_align_size=None)
            if found != AddReqResult.CONTINUE:
                self.full = self.full or found == AddReqResult.NO_TOKEN
                break
        if adder.new_chunked_req is not None:
            self.chunked = self._requests[id(adder.new_chunked_req)]
        self.batch = [self._requests[id(req)] for req in adder.can_run_list]
        chosen = {id(request) for request in self.batch}
        self.waiting = [request for request in self.waiting if id(request) not in chosen]
        for request in self.batch:
            self._begin(request)
        return self.batch

    def _begin(self, request: SimulatedRequest) -> None:
        req = request.req
        past = _prefix(req)
        if request.cached < 0:
            request.cached = past
        if not request.protected and not len(request.held):
            request.protected = past
        request.extend = (_end(req) - past, past)
        self._take(request, request.extend[0])

    def finish_prefill(self) -> list[SimulatedRequest]:
        """End the prefill batch and return the requests that have their first token."""
        done = [request for request in self.batch if request is not self.chunked]
        for request in self.batch:
            length = _end(request.req)
            self._cache(request, request.req.full_untruncated_fill_ids[:length])
            _set_prefix(request.req, length)
        self.running += done
        self.reqs = [request.req for request in self.running]
        self.batch = []
        return done

    def grow(self, request: SimulatedRequest, units: int) -> None:
        """Let the answer have `units`; when the pool is full, the request with the shortest answer waits again."""
        missing = units - len(request.req.output_ids)
        if missing <= 0 or request not in self.running:
            return
        while not self._take(request, missing):
            victim = min(self.running, key=lambda one: (len(one.req.output_ids), -len(one.req.origin_input_ids)))
            self._retract(victim)
            if victim is request:
                return
        request.req.output_ids.extend(request.answer[units - missing : units])

    def decoded(self, steps: int) -> None:
        """Note that decode steps have run."""
        self.ratio.current = max(self.ratio.current - steps * self.ratio.decay, self.ratio.min)

    def finish(self, request: SimulatedRequest) -> None:
        """Remove a request with its whole answer; the cache keeps what it computed."""
        ids = request.req.origin_input_ids + request.req.output_ids
        self._cache(request, ids)
        self._drop(request)

    def _retract(self, request: SimulatedRequest) -> None:
        self._drop(request)
        request.protected, request.req.last_node = 0, None
        _set_prefix(request.req, 0)
        self._requests[id(request.req)] = request
        self.waiting.append(request)

    def _drop(self, request: SimulatedRequest) -> None:
        self.pool.free(request.held)
        request.held = request.held[:0]
        self.tree.dec_lock_ref(request.req.last_node)
        self.running.remove(request)
        self.reqs = [one.req for one in self.running]
        self.full = False
        del self._requests[id(request.req)]

    def _take(self, request: SimulatedRequest, units: int) -> bool:
        """Allocate units of the pool, after eviction if needed."""
        missing = units - self.pool.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        taken = self.pool.alloc(units)
        if taken is None:
            return False
        request.held = torch.cat([request.held, taken])
        return True

    def _cache(self, request: SimulatedRequest, ids: array[int]) -> None:
        """Give the tree what was computed, and free what the tree has already."""
        if self.tree.disable:
            return
        owned = torch.zeros(request.protected, dtype=torch.int64)  # the tree reads only what it does not have
        values = torch.cat([owned, request.held])
        result = self.tree.insert(InsertParams(key=RadixKey(ids), value=values))
        node = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids))).last_device_node
        kept = max(len(ids) - self.limits.eagle, 0)
        self.pool.free(values[request.protected : max(result.prefix_len, request.protected)])
        request.held, request.protected = values[kept:], kept
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(request.req.last_node)
        request.req.last_node = node


class _Delayer(PrefillDelayer):
    """SGLang's PrefillDelayer of a rank; `gathered` is the message of every rank, for which SGLang needs processes."""

    def __init__(self, ranks: int) -> None:
        _configure()
        self.enable_dp_attention = self.attn_dp_enabled = True
        self.dp_size = self.num_dp_ranks = ranks
        self._max_delay_passes = get_schedule().prefill_delayer_max_delay_passes
        self._token_usage_low_watermark = self._queue_min_ratio = self._curr_state = self._metrics_collector = None
        self._queue_trigger_enabled = self._debug_log_enabled = False
        self.skip_first_delayer = True
        self.gathered = torch.zeros((ranks, 6), dtype=torch.int64)

    def _gather_info(self, **_own: object) -> torch.Tensor:
        return self.gathered


class _Asking(PrefillDelayerSinglePassExecutor):
    """Executor that refuses every request, and remembers that there is one."""

    def __init__(self, prefillable: bool) -> None:
        self.prefillable = prefillable

    def negotiate_should_allow_prefill(self, **_own: object) -> bool:
        self.prefillable = True
        return False


class DelayedPrefills:
    """Prefills of the ranks of DP attention that begin together, by SGLang's `enable-prefill-delayer`."""

    def __init__(self, ranks: Sequence[SimulatedScheduler]) -> None:
        self.ranks, self.delayers = ranks, [_Delayer(len(ranks)) for _ in ranks]

    def plan(self) -> list[list[SimulatedRequest]]:
        """Choose the next prefill batch of every rank; while no request runs, SGLang's loop asks again at once."""
        while True:
            prefillable, batches = self._pass()
            if any(batches) or not prefillable or any(rank.running for rank in self.ranks):
                return batches

    @property
    def waiting(self) -> bool:
        """True while a request waits that the next pass may let begin."""
        return any(rank.waiting and not rank.full for rank in self.ranks)

    def _pass(self) -> tuple[bool, list[list[SimulatedRequest]]]:
        rows, batches = [], []
        for rank in self.ranks:
            asking = _Asking(rank.chunked is not None)  # a chunked prefill is continued in any case
            if not asking.prefillable:
                rank.plan_prefill(asking)
            rows.append((asking.prefillable, 0, len(rank.running), rank.sizes.max_prefill_bs, len(rank.waiting), 0))
        for rank, delayer in zip(self.ranks, self.delayers, strict=True):
            delayer.gathered = torch.tensor(rows, dtype=torch.int64)
            executor = PrefillDelayerSinglePassExecutor(delayer, 0.0)
            batches.append(rank.plan_prefill(executor))
            if attempted := executor.finalize(actual_prefill_bs=len(batches[-1])):
                rank.sizes.observe_attempt(attempted)
        return any(row[0] for row in rows), batches


def _prefix(req: Any) -> int:
    return int(req.prefix_len) if hasattr(req, "prefix_len") else len(req.prefix_indices)


def _end(req: Any) -> int:
    return int(req.extend_end if hasattr(req, "extend_end") else req.extend_range.end)


def _set_prefix(req: Any, length: int) -> None:
    if hasattr(req, "prefix_len"):
        req.prefix_len = length
    else:
        req.prefix_indices = torch.empty(length, dtype=torch.int64)

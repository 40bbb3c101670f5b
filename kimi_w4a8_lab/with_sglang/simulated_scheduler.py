"""SGLang's scheduling policy and radix cache without an engine, for simulations of traffic.

SGLang's own classes decide which requests are prefilled, in which chunks, and what the prefix cache keeps: Req,
SchedulePolicy, PrefillAdder, RadixCache, NewTokenRatioTracker and the token allocator. The scheduler's loop around them
needs a device, so this class is a model of it: it merges finished prefills into the running batch, lets answers grow,
and retracts requests when the pool is full.

All lengths are in units of some tokens, so that a prompt of 100,000 tokens does not need as many numbers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache import base_prefix_cache, radix_cache
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of one scheduler, in units.

    eagle: keys of the cache are pairs of units, as with EAGLE drafts. host: units of KV in host memory.
    """

    pool: int
    chunk: int
    max_prefill: int
    max_running: int
    prefix_cache: bool = True
    eagle: bool = False
    host: int = 0


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

        def radix(units: int) -> tuple[Any, Any]:
            pool = TokenToKVPoolAllocator(units, torch.int64, "cpu", None, False)
            params: Any = CacheInitParams(not limits.prefix_cache, None, pool, 1, is_eagle=limits.eagle)
            return pool, radix_cache.RadixCache(params)

        self.pool, self.tree = radix(limits.pool)
        self.host_pool, self.host_tree = radix(limits.host)
        self.policy: Any = schedule_policy.SchedulePolicy("fcfs", self.tree, False, False, False)
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
        self._requests: dict[int, SimulatedRequest] = {}

    def batch_size(self) -> int:
        """Return the size of the running batch, for PrefillAdder."""
        return len(self.reqs)

    @property
    def units(self) -> int:
        """Units of all requests, waiting or not."""
        return sum(request.length for request in self._requests.values())

    def add(self, name: str, prompt: array[int], answer: array[int], tag: Any) -> None:
        """Queue a request whose answer will have the units of `answer`."""
        sampling = SamplingParams(max_new_tokens=len(answer), ignore_eos=True)
        request = SimulatedRequest(Req(name, None, prompt, sampling), answer, tag)
        self._requests[id(request.req)] = request
        self.waiting.append(request)

    def plan_prefill(self) -> list[SimulatedRequest]:
        """Choose the next prefill batch; empty if the running batch should decode."""
        if (self.full or not self.waiting) and self.chunked is None:
            return []
        if len(self.running) >= self.limits.max_running and self.chunked is None:
            self.full = True
            return []
        queue = [request.req for request in self.waiting]
        self.policy.calc_priority(queue)
        adder = schedule_policy.PrefillAdder(
            1, self.tree, self.pool, self, self.ratio.current, self.limits.max_prefill, self.limits.chunk
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
            if found != schedule_policy.AddReqResult.CONTINUE:
                self.full = self.full or found == schedule_policy.AddReqResult.NO_TOKEN
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
        if self.limits.host:
            self._fill(self.host_pool, self.host_tree, ids)

    def load_back(self) -> int:
        """Load prefixes of waiting requests from host memory, and return the units; a model of SGLang's HiCache."""
        loaded = 0
        if self.limits.host and not self.full:
            for request in self.waiting[: self.limits.max_running - len(self.running)]:
                ids = request.req.origin_input_ids
                loaded += self._fill(self.pool, self.tree, ids[: self._match(self.host_tree, ids)[0]])
        return loaded

    def _match(self, tree: Any, ids: array[int]) -> tuple[int, Any]:
        """Return the units of the longest prefix in the tree, and its node."""
        found = tree.match_prefix(base_prefix_cache.MatchPrefixParams(key=radix_cache.RadixKey(ids)))
        length = found.device_prefix_len if hasattr(found, "device_prefix_len") else len(found.device_indices)
        return int(length), found.last_device_node

    def _fill(self, pool: Any, tree: Any, ids: array[int]) -> int:
        """Make a tree contain these units, if evictions can make room; return the number of new ones."""
        there, node = self._match(tree, ids)
        missing = len(ids) - self.limits.eagle - there
        if missing <= 0:
            return 0
        tree.inc_lock_ref(node)
        if (more := missing - pool.available_size()) > 0:
            tree.evict(base_prefix_cache.EvictParams(num_tokens=more))
        taken = pool.alloc(missing)
        if taken is not None:
            values = torch.cat([torch.zeros(there, dtype=torch.int64), taken])
            tree.insert(base_prefix_cache.InsertParams(key=radix_cache.RadixKey(ids), value=values))
        tree.dec_lock_ref(node)
        return 0 if taken is None else missing

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
            self.tree.evict(base_prefix_cache.EvictParams(num_tokens=missing))
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
        result = self.tree.insert(base_prefix_cache.InsertParams(key=radix_cache.RadixKey(ids), value=values))
        _, node = self._match(self.tree, ids)
        kept = max(len(ids) - self.limits.eagle, 0)
        self.pool.free(values[request.protected : max(result.prefix_len, request.protected)])
        request.held, request.protected = values[kept:], kept
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(request.req.last_node)
        request.req.last_node = node


def _prefix(req: Any) -> int:
    return int(req.prefix_len) if hasattr(req, "prefix_len") else len(req.prefix_indices)


def _end(req: Any) -> int:
    return int(req.extend_end if hasattr(req, "extend_end") else req.extend_range.end)


def _set_prefix(req: Any, length: int) -> None:
    if hasattr(req, "prefix_len"):
        req.prefix_len = length
    else:
        req.prefix_indices = torch.empty(length, dtype=torch.int64)

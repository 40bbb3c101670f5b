"""Runs a program of SGLang with one planted fault that changes answers; the file KIMI_PLANTED names it at every step.

One server is enough for all of them: a test writes the file anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kimi_w4a8_eagle3.sampling.penalties import Penalties
from kimi_w4a8_eagle3.sglang_plugin.decoding import exact_sampling
from kimi_w4a8_eagle3.sglang_plugin.run_module import run
from kimi_w4a8_laptop.cpu import draft_chain, locations

ALL_DRAFTS, BONUS, STALE_KV = "every draft accepted", "bonus token from the draft", "KV of a rejected token kept"
POSITION, HIDDEN = "position off by one after a partial acceptance", "hidden state of the wrong token"
PAGE, LATE = "wrong page in a radix node", "stop string cut late"
SHARED, REUSED = "one draw for all requests", "noise of the position before"
EARLIER, UNEQUAL = "penalties of the step before", "draft accepted without equality"

_verify, _build = draft_chain.verify_tree_greedy_cpu, draft_chain.build_tree_kernel_efficient_cpu
_locations = locations.assign_extend_cache_locs_cpu
_draw, _accept, _penalize = exact_sampling.draw, exact_sampling._accept, Penalties.apply
_step: tuple[list[int], list[int]] = ([], [])  # rows of the request pool and lengths at the step under way
_rejected: dict[int, int] = {}  # by row, the length at which a draft was rejected last


def planted() -> str:
    return Path(os.environ["KIMI_PLANTED"]).read_text()


def verify(**call: torch.Tensor) -> None:
    """The verification; and which requests had a draft rejected."""
    fault, candidates = planted(), call["candidates"]
    if fault == ALL_DRAFTS:  # told that the target would have chosen exactly what the draft proposed
        call["target_predict"] = torch.cat([candidates[:, 1:], call["target_predict"][:, -1:]], 1)
    _verify(**call)
    for row, (slot, length, accepted) in enumerate(zip(*_step, call["accept_token_num"].tolist(), strict=True)):
        _rejected.pop(slot, None)
        if accepted < candidates.shape[1] - 1:
            _rejected[slot] = length + accepted + 1
            if fault == BONUS:
                call["predicts"][call["accept_index"][row, accepted].long()] = candidates[row, accepted + 1]


def build_tree(parents: Any, selected: Any, lengths: Any, mask: Any, positions: Any, *rest: Any) -> None:
    _build(parents, selected, lengths, mask, positions, *rest)
    if planted() == POSITION:
        late = torch.tensor([length in _rejected.values() for length in lengths.tolist()])
        positions.view(len(lengths), -1)[late] += 1


def verified_locations(pool: Any, table: Any, start: Any, end: Any, out: Any, width: int) -> None:
    """Write the KV of the verified token not over the rejected one, but into slot 0, which is never read."""
    global _step
    _locations(pool, table, start, end, out, width)
    _step = pool.tolist(), start.tolist()
    if planted() == STALE_KV:
        kept = torch.tensor([_rejected.get(slot) == length for slot, length in zip(*_step, strict=True)])
        out.view(len(pool), -1)[kept, 0] = 0


def draft_extend(worker: Any, batch: Any, result: Any) -> None:
    if planted() == HIDDEN:
        result.logits_output.hidden_states = result.logits_output.hidden_states.roll(1, 0)


def next_round(original: Callable[..., Any], req: Any, *args: Any, **named: Any) -> None:
    original(req, *args, **named)
    if planted() == PAGE and len(req.prefix_indices) > 1:
        req.prefix_indices = req.prefix_indices.clone()
        req.prefix_indices[-1] = req.prefix_indices[0]


def stop_string(original: Callable[..., bool], req: Any, *args: Any) -> bool:
    """Found one step late."""
    found = original(req, *args)
    if found and planted() == LATE and not getattr(req, "kimi_late", False):
        req.kimi_late, req.finished_reason, req.finished_len = True, None, None
        return False
    return found


def draw(probs: torch.Tensor, filters: Any, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if planted() == SHARED:
        seeds = seeds[:1].expand_as(seeds)
    if planted() == REUSED:  # two positions share their noise
        positions = positions // 2 * 2
    return _draw(probs, filters, seeds, positions)


def accept(verify_input: Any, drawn: torch.Tensor, chains: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if planted() == UNEQUAL:
        drawn = torch.cat([chains[:, 1:2].to(drawn.dtype), drawn[:, 1:]], 1)
    return _accept(verify_input, drawn, chains)


def penalize(
    penalties: Penalties, logits: torch.Tensor, positions: torch.Tensor, chains: torch.Tensor | None = None
) -> None:
    """All positions of a step with the state before it."""
    if chains is None or planted() != EARLIER:
        _penalize(penalties, logits, positions, chains)
        return
    rows = logits.view(*chains.shape, -1)
    for place in range(chains.shape[1]):
        _penalize(penalties, rows[:, place], positions.view(chains.shape)[:, place])


if __name__ == "__main__":
    exact_sampling.draw, exact_sampling._accept = draw, accept
    Penalties.apply = penalize  # type: ignore[method-assign]
    # SGLang took them by `from sgl_kernel import`; the scheduler is a fork of this process.
    for right, wrong in ((_verify, verify), (_build, build_tree), (_locations, verified_locations)):
        for module in list(sys.modules.values()):
            for name in [name for name, held in getattr(module, "__dict__", {}).items() if held is right]:
                setattr(module, name, wrong)
    schedule, worker = "sglang.srt.managers.schedule_batch.Req", "sglang.srt.speculative.eagle_worker_v2"
    HookRegistry.register(f"{worker}.EagleDraftWorker._draft_extend_for_decode", draft_extend, HookType.BEFORE)
    HookRegistry.register(f"{schedule}.init_next_round_input", next_round, HookType.AROUND)
    HookRegistry.register(f"{schedule}._check_str_based_finish", stop_string, HookType.AROUND)
    run(sys.argv[1], sys.argv[2:])

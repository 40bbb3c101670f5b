"""Effect of each setting that changes a step or a prefill, and the known faults that it meets on MI325X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.on_machine import concerning
from kimi_w4a8_lab.predict.machine_model import Cluster, kimi, moe_shape
from kimi_w4a8_lab.predict.predict import Fit, Load, choices, step_terms

from . import moe_time, shares
from .draw_time import draw_ms
from .parts import Account, AccountRow, StepPart, decode_attention

SHARED = "enable-attn-tp-input-scattered=true"
SHARED_KERNELS = 4  # of the shared expert: gate and up, SiLU, down, and the addition


@dataclass(frozen=True)
class Change:
    """Change of a load's time. settings: as for `serve --set`; none where clients decide. saved: milliseconds."""

    name: str
    settings: tuple[str, ...]
    step_ms: float
    prefill_ms: float


@dataclass(frozen=True)
class Lever:
    """One change alone, or several: milliseconds saved, the resulting figures, and the known faults that it meets."""

    change: Change
    tpot_ms: float
    throughput_tok_s: float
    faults: tuple[str, ...] = ()


def now(account: Account) -> Lever:
    """Return the figures without a change."""
    return _lever(account, Change("now", (), 0.0, 0.0))


def levers(account: Account, fit: Fit, cluster: Cluster) -> list[Lever]:
    """Return each change alone, those without a known fault first, in the order of throughput."""
    changes = [*_savings(account, cluster), *_draft_steps(account, fit, cluster)]
    found = [_lever(account, change) for change in changes if change.step_ms or change.prefill_ms]
    return sorted(found, key=lambda lever: (bool(lever.faults), -lever.throughput_tok_s))


def together(account: Account, found: Sequence[Lever]) -> Lever:
    """Return all levers without a known fault that gain something, at once."""
    used = [
        lever.change for lever in found if not lever.faults and lever.throughput_tok_s > now(account).throughput_tok_s
    ]
    settings = tuple(setting for change in used for setting in change.settings)
    step, prefill = sum(change.step_ms for change in used), sum(change.prefill_ms for change in used)
    return _lever(account, Change("all without a known fault", settings, step, prefill))


def costs(account: Account) -> list[Lever]:
    """Return what costs time: sampled requests."""
    load = account.load
    drawn = draw_ms(load.concurrency * (load.steps + 1), kimi().vocab)
    return [_lever(account, Change("requests sampled with top-p, not greedy", (), -drawn, 0.0))]


def ms(rows: Sequence[AccountRow], part: StepPart) -> float:
    """Return the milliseconds of one part."""
    return sum(row.ms for row in rows if row.part is part)


def _savings(account: Account, cluster: Cluster) -> list[Change]:
    load, s, small = account.load, kimi(), moe_time.SMALL_US / 1000

    def moe(tokens: int, rows: Sequence[AccountRow]) -> float:
        ours = moe_time.ours(cluster.gpu, moe_shape(s, cluster), tokens)
        return ms(rows, StepPart.EXPERTS) - s.moe_layers * sum(part.us for part in ours) / 1000

    kernels = moe(load.concurrency * (load.steps + 1), account.step), moe(load.input_len, account.prefill)
    half = ms(account.step, StepPart.ATTENTION) - decode_attention(load, cluster, s, 1.0).ms
    fused = 2 * s.layers * small
    custom = "disable-custom-all-reduce=false"  # QuickReduce and AITER's fusion exist only with it
    fusion = "enable-aiter-allreduce-fusion=true"
    quick = "env.ROCM_QUICK_REDUCE_QUANTIZATION=INT8"
    shared = s.moe_layers * (SHARED_KERNELS - 1) * small  # all but the addition, in decode's graphs only
    return [
        Change("MoE kernels of this package", ("env.KIMI_MOE_BACKEND=flydsl",), *kernels),
        Change("attention input shared by ranks", (SHARED,), 0.0, shares.saved_ms(account, cluster)),
        Change("FP8 KV cache", ("kv-cache-dtype=fp8_e4m3",), half, 0.0),
        Change("all-reduce, residual and norm in one kernel", (custom, fusion), fused, fused),
        Change("prefill all-reduces in INT8", (custom, quick), 0.0, ms(account.prefill, StepPart.REDUCES) / 2),
        Change("shared expert on a second stream", ("env.SGLANG_ROCM_USE_MULTI_STREAM=1",), shared, 0.0),
    ]


def _draft_steps(account: Account, fit: Fit, cluster: Cluster) -> list[Change]:
    """Return the best other number of draft steps by the fitted model."""
    load = account.load
    best = max(choices(load, fit, cluster), key=lambda choice: choice.throughput_tok_s)
    if not load.steps or best.steps == load.steps:
        return []
    other = replace(load, steps=best.steps, accept_length=best.accept_length)
    token_s, now_s = (float(step_terms(one, cluster) @ fit.vector) / one.accept_length for one in (other, load))
    settings = f"speculative-num-steps={best.steps}", f"speculative-num-draft-tokens={best.steps + 1}"
    return [
        Change(
            f"{best.steps} draft steps instead of {load.steps}", settings, account.step_ms * (1 - token_s / now_s), 0.0
        )
    ]


def _lever(account: Account, change: Change) -> Lever:
    load = account.load
    step_ms, prefill_ms = account.step_ms - change.step_ms, account.prefill_ms - change.prefill_ms
    return Lever(change, *throughput(load, step_ms, prefill_ms), faults(load, change.settings))


def throughput(load: Load, step_ms: float, prefill_ms: float) -> tuple[float, float]:
    """Return TPOT in ms and throughput in tok/s."""
    later, token_ms = load.output_len - 1, step_ms / load.accept_length
    tpot = token_ms + prefill_ms * (load.concurrency - 1) / 2 / later
    wave_ms = prefill_ms * load.concurrency + token_ms * later
    return tpot, load.concurrency * load.output_len / wave_ms * 1000


def faults(load: Load, settings: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the known faults that the settings add to the recipe of this load on MI325X."""
    recipe = load_recipe("eagle3-opt" if load.steps else "w4a8")

    def met(changes: Sequence[str]) -> list[str]:
        resolved = resolve(recipe, changes)
        return [fault.id for fault in concerning(resolved.args, resolved.recipe.environment, "gfx942", {})]

    before = met(())
    return tuple(fault for fault in met(settings) if fault not in before)

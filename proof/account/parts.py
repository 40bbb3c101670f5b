"""Account of a decode step and a prefill, part by part, against the published figures, with possible improvements.

Every part is a formula with a calibration from another source than the published figures. The row "unexplained" holds
the rest, including host work between steps. The published figures ran AITER's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kimi_w4a8_eagle3.bench import published
from kimi_w4a8_eagle3.predict.machine_model import (
    BF16_BYTES,
    Cluster,
    Shapes,
    draft_step,
    fixed_weights,
    kimi,
    moe_shape,
)
from kimi_w4a8_eagle3.predict.predict import Fit, Load, choices, predict, terms
from kimi_w4a8_eagle3.recipe.deterministic import CHUNK

from . import moe_time
from .draw_time import draw_ms

# Kernels of a layer beside routed experts and all-reduces, counted in SGLang's DeepSeek model on AITER: two norms (with
# the residual); q and kv down, two norms of them, q up, key absorption, rotary, concatenation of q, and of k with the
# write to the pool, attention and its merge, value absorption, transpose, output; router, choice of experts; the shared
# expert's gate and up, SiLU, down, and the addition.
LAYER_KERNELS, SHARED_KERNELS, DRAFT_KERNELS = 21, 4, 18
HIDDEN_PASSES = 14  # reads and writes of a token's hidden vector by a layer's kernels in a prefill
READ_TB_S = moe_time.STAGE_TB_S[1]
# One-stage custom all-reduce, TP 8: 6.3 us at 24 KB and 24.2 us at 1.5 MB (vllm#39080, on MI355X).
REDUCE_US, REDUCE_US_PER_MB = 6.0, 11.6
LINK_TB_S = 7 * 0.048  # 48 of 64 GB/s per link are usable (ROCm blog on RCCL and xGMI)
GEMM_TFLOPS, ATTENTION_TFLOPS = 620.0, 400.0  # BF16 on an MI300X; the second is assumed
_MODEL, _MOE_SOURCE = "counted", "proof/account/moe_time.py"


class Part(str, Enum):
    """Part of a step or prefill that a change can reduce."""

    EXPERTS = "experts"
    KV_ONCE = "KV once"
    KV_AGAIN = "KV again"
    REDUCES = "all-reduces"
    OTHER = "other"


@dataclass(frozen=True)
class Row:
    """Row of the account; uncertainty is a share of ms. Rows without launches share the launches of others."""

    name: str
    ms: float
    launches: int
    formula: str
    source: str
    uncertainty: float
    part: Part = Part.OTHER


@dataclass(frozen=True)
class Lever:
    """Effect of one change alone: milliseconds saved per step and per prefill, and the resulting figures."""

    name: str
    step_ms: float
    prefill_ms: float
    tpot_ms: float
    throughput_tok_s: float


@dataclass(frozen=True)
class Account:
    """Account of a load. Both lists end with the row "unexplained" and sum to `step_ms` and `prefill_ms`."""

    load: Load
    source: str
    step_ms: float
    prefill_ms: float
    step: list[Row]
    prefill: list[Row]
    now: Lever
    levers: list[Lever]


def explain(load: Load, fit: Fit, cluster: Cluster) -> Account:
    """Account for a load against its published figures, or against the fitted model if none are published."""
    shapes = kimi()
    step_ms, prefill_ms, source = _totals(load, fit, cluster)
    step, prompt = step_parts(load, cluster, shapes), prefill_parts(load, cluster, shapes)
    return Account(
        load,
        source,
        step_ms,
        prefill_ms,
        _with_rest(step, step_ms),
        _with_rest(prompt, prefill_ms),
        _lever("now", load, step_ms, prefill_ms),
        _levers(load, step_ms, prefill_ms, step, prompt, fit, cluster, shapes),
    )


def _totals(load: Load, fit: Fit, cluster: Cluster) -> tuple[float, float, str]:
    """Return the milliseconds of a step, those of one request's prefill, and their source."""
    sides = published.points().get(f"con{load.concurrency}")
    figures = (sides or {}).get("w4a8" if load.steps == 0 else "eagle3" if load.concurrency > 2 else "eagle3-opt")
    known = Load(load.concurrency, steps=3 if load.steps else 0, accept_length=load.accept_length)
    if sides is None or figures is None or load != known:
        alone = predict(replace(load, concurrency=1), "ttft_median_ms", fit, cluster)
        step_s = float(terms(load, "itl_median_ms", cluster) @ fit.vector) * load.accept_length
        return step_s * 1000, alone, "the fitted model (no published figures for this load)"
    waits = figures.get("ttft_median_ms", sides["w4a8"]["ttft_median_ms"])
    prefill_ms = waits / (1 + (load.concurrency - 1) / 2)
    itl = figures.get("itl_median_ms")
    if itl is None:  # subtract what other requests' prefills add to TPOT
        itl = figures["tpot_median_ms"] - prefill_ms * (load.concurrency - 1) / 2 / (load.output_len - 1)
    return itl * figures.get("accept_length", 1.0), prefill_ms, published.load(published.MAIN)["source"]


def step_parts(load: Load, cluster: Cluster, shapes: Shapes, rereads: float | None = None) -> list[Row]:
    """Return the parts of one target pass over steps + 1 tokens per request, and of the draft's steps.

    rereads: how often a verify step reads the KV cache after the first time; None takes it from the published figures.
    """
    s, tokens = shapes, load.concurrency * (load.steps + 1)
    context = load.input_len + load.output_len / 2
    rows = _moe_rows(cluster, s, tokens)
    kv = load.concurrency * context * s.layers * (s.kv_rank + s.rope) * BF16_BYTES
    formula = f"{load.concurrency} x {context:.0f} tokens, {kv / 1e9:.1f} GB / {READ_TB_S} TB/s"
    rows.append(Row("attention: KV cache, once", kv / READ_TB_S / 1e9, 0, formula, _MODEL, 0.2, Part.KV_ONCE))
    if load.steps:
        again = published_rereads(cluster, s) if rereads is None else rereads
        what = "eagle3 minus w4a8 at concurrency 40, published"
        rows.append(
            Row(
                "attention: KV cache, again",
                again * kv / READ_TB_S / 1e9,
                0,
                f"{again:.1f} x",
                what,
                0.6,
                Part.KV_AGAIN,
            )
        )
    fixed = fixed_weights(s, cluster.tp) * BF16_BYTES
    formula = f"{fixed / 1e9:.1f} GB / {moe_time.SMALL_TB_S} TB/s"
    rows.append(Row("attention, shared, head weights", fixed / moe_time.SMALL_TB_S / 1e9, 0, formula, _MODEL, 0.2))
    message = tokens * s.hidden * BF16_BYTES / 1e6
    one_us, count = REDUCE_US + REDUCE_US_PER_MB * message, 2 * s.layers
    formula = f"{count} x ({REDUCE_US} us + {message:.2f} MB x {REDUCE_US_PER_MB} us)"
    rows.append(
        Row("all-reduces", count * one_us / 1000, count, formula, "vllm#39080, TP 8 on MI355X", 0.4, Part.REDUCES)
    )
    rows.append(_small(s.layers * LAYER_KERNELS, "other kernels"))
    if load.steps:
        launches = load.steps * DRAFT_KERNELS
        read = float(draft_step(load.concurrency, context, cluster, s)[1]) * cluster.gpu.hbm_tb_s / moe_time.SMALL_TB_S
        ms = launches * moe_time.SMALL_US / 1000 + load.steps * read * 1000
        formula = f"{launches} x {moe_time.SMALL_US} us + {load.steps} x {read * 1e6:.0f} us of weights and KV"
        rows.append(Row("draft", ms, launches, formula, _MODEL, 0.4))
    return rows


def published_rereads(cluster: Cluster, shapes: Shapes) -> float:
    """Return how often the published verify step reads KV after the first time.

    That is verify minus plain decode, less the other known differences: 0 if one reading serves all tokens of a
    request, 3 if each token reads for itself. Common errors cancel.
    """
    fit = Fit(1.0, 1.0, 1.0)  # unused, because both loads are published
    loads = Load(40), Load(40, steps=3, accept_length=1.0)
    known = [sum(row.ms for row in step_parts(load, cluster, shapes, rereads=0.0)) for load in loads]
    plain, verify = (_totals(load, fit, cluster)[0] for load in loads)
    once = _ms(step_parts(loads[0], cluster, shapes), Part.KV_ONCE)
    return min(max(0.0, ((verify - plain) - (known[1] - known[0])) / once), 3.0)


def prefill_parts(load: Load, cluster: Cluster, shapes: Shapes) -> list[Row]:
    """Return the parts of one request's prefill in one piece."""
    s, tokens = shapes, load.input_len
    linear = 2 * tokens * (fixed_weights(s, cluster.tp) - s.vocab * s.hidden / cluster.tp)
    attention = tokens**2 * s.layers * s.heads / cluster.tp * (s.nope + s.rope + s.v_head)
    reduced = 2 * s.layers * 2 * (cluster.tp - 1) / cluster.tp * tokens * s.hidden * BF16_BYTES
    passes = s.layers * HIDDEN_PASSES * tokens * s.hidden * BF16_BYTES
    small = _small(s.layers * LAYER_KERNELS, "other kernels")
    formula = f"{small.formula} + {passes / 1e9:.0f} GB / {moe_time.SMALL_TB_S} TB/s"
    link = f"{reduced / 1e9:.0f} GB / {LINK_TB_S * 1000:.0f} GB/s"
    gemm = f"{linear / 1e12:.0f} Tflop / {GEMM_TFLOPS:.0f} TFLOPS"
    scores = f"{attention / 1e12:.1f} Tflop / {ATTENTION_TFLOPS:.0f} TFLOPS"
    return [
        *(replace(row, source="at least: MFMA at its peak", uncertainty=1.0) for row in _moe_rows(cluster, s, tokens)),
        Row("dense matrix products", linear / GEMM_TFLOPS / 1e9, 0, gemm, "BF16 of an MI300X, SemiAnalysis 2024", 0.3),
        Row("attention", attention / ATTENTION_TFLOPS / 1e9, 0, scores, "assumed", 0.4),
        Row(
            "all-reduces", reduced / LINK_TB_S / 1e9, 2 * s.layers, link, "ROCm blog, RCCL and xGMI", 0.2, Part.REDUCES
        ),
        replace(small, ms=small.ms + passes / moe_time.SMALL_TB_S / 1e9, formula=formula),
    ]


def _moe_rows(cluster: Cluster, s: Shapes, tokens: int) -> list[Row]:
    return [
        Row(
            f"MoE: {part.name}",
            s.moe_layers * part.us / 1000,
            s.moe_layers * part.launches,
            f"{s.moe_layers} x ({part.formula})",
            _MOE_SOURCE,
            0.25,
            Part.EXPERTS,
        )
        for part in moe_time.aiter(cluster.gpu, moe_shape(s, cluster), tokens)
    ]


def _small(launches: int, name: str) -> Row:
    formula = f"{launches} x {moe_time.SMALL_US} us"
    return Row(name, launches * moe_time.SMALL_US / 1000, launches, formula, "SGLang's model; 3 to 9 us each", 0.4)


def _with_rest(rows: Sequence[Row], total: float) -> list[Row]:
    rest = total - sum(row.ms for row in rows)
    spread = sum((row.ms * row.uncertainty) ** 2 for row in rows) ** 0.5
    uncertainty = spread / max(abs(rest), 1e-9)
    return [*rows, Row("unexplained", rest, 0, "total minus the rows above", "includes host work", uncertainty)]


def _lever(
    name: str, load: Load, step_ms: float, prefill_ms: float, before: tuple[float, float] | None = None
) -> Lever:
    """Return TPOT and throughput after a change; before: (step, prefill) milliseconds without it."""
    later = load.output_len - 1
    token_ms = step_ms / load.accept_length
    tpot = token_ms + prefill_ms * (load.concurrency - 1) / 2 / later
    wave_ms = prefill_ms * load.concurrency + token_ms * later
    saved = (before[0] - step_ms, before[1] - prefill_ms) if before else (0.0, 0.0)
    return Lever(name, *saved, tpot, load.concurrency * load.output_len / wave_ms * 1000)


def _levers(
    load: Load,
    step_ms: float,
    prefill_ms: float,
    step: list[Row],
    prompt: list[Row],
    fit: Fit,
    cluster: Cluster,
    s: Shapes,
) -> list[Lever]:
    """Return each change alone by throughput gain, then all changes but other draft steps, then what costs."""

    def moe(tokens: int, rows: list[Row]) -> float:
        ours = moe_time.ours(cluster.gpu, moe_shape(s, cluster), tokens)
        return _ms(rows, Part.EXPERTS) - s.moe_layers * sum(part.us for part in ours) / 1000

    again = _ms(step, Part.KV_AGAIN)
    small = moe_time.SMALL_US / 1000
    tokens = load.concurrency * (load.steps + 1)
    saved = {
        "this package's MoE kernels": (moe(tokens, step), moe(load.input_len, prompt)),
        "a verify reads KV once": (again, 0.0),
        "FP8 KV cache": ((_ms(step, Part.KV_ONCE) + again) / 2, 0.0),
        "all-reduce, residual and norm in one kernel": (2 * s.layers * small, 2 * s.layers * small),
        "prefill all-reduces in INT8": (0.0, _ms(prompt, Part.REDUCES) / 2),
        "shared expert on a second stream, SGLANG_ROCM_USE_MULTI_STREAM": (
            s.moe_layers * (SHARED_KERNELS - 1) * small,  # all but the addition
            0.0,  # in decode's graphs only
        ),
    }
    saved = {name: pair for name, pair in saved.items() if any(pair)}
    before = step_ms, prefill_ms
    found = [_lever(name, load, step_ms - a, prefill_ms - b, before) for name, (a, b) in saved.items()]
    if load.steps:
        best = max(choices(load, fit, cluster), key=lambda choice: choice.throughput_tok_s)
        other = Load(load.concurrency, load.input_len, load.output_len, load.precision, best.steps, best.accept_length)
        ratio = float(terms(other, "itl_median_ms", cluster) @ fit.vector)
        ratio /= float(terms(load, "itl_median_ms", cluster) @ fit.vector)
        name = f"{best.steps} draft steps instead of {load.steps} (fitted model)"
        found += [_lever(name, load, step_ms * ratio, prefill_ms)] if best.steps != load.steps else []  # other steps
    found.append(
        _lever("requests sampled with top-p, not greedy", load, step_ms + draw_ms(tokens, s.vocab), prefill_ms, before)
    )
    found.sort(key=lambda lever: -lever.throughput_tok_s)
    # KV read once and in FP8 save from the same bytes.
    a, b = (sum(pair[i] for pair in saved.values()) for i in (0, 1))
    found.append(_lever("all of them but draft steps", load, step_ms - a + again / 2, prefill_ms - b, before))
    slower = prefill_ms + _deterministic_ms(load, prompt, cluster, s)
    return [*found, _lever("options.deterministic (attention, products: unknown)", load, step_ms, slower, before)]


def _deterministic_ms(load: Load, prompt: list[Row], cluster: Cluster, s: Shapes) -> float:
    """Return the known part of a prompt's cost: experts read for each small chunk, and one-stage all-reduces.

    One stage reads seven bytes for each byte of a rank's sum, a ring 2 x 7/8.
    """
    chunks = math.ceil(load.input_len / CHUNK)
    again = chunks * sum(row.ms for row in _moe_rows(cluster, s, CHUNK))
    return max(again - _ms(prompt, Part.EXPERTS), 0.0) + 3 * _ms(prompt, Part.REDUCES)


def _ms(rows: Sequence[Row], part: Part) -> float:
    return sum(row.ms for row in rows if row.part is part)

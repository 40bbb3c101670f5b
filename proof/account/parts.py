"""Account of a decode step and a prefill, part by part, against the published figures.

Every part is a formula with a calibration from another source than the published figures. The row "unexplained" holds
the rest, including host work between steps. The published figures ran AITER's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kimi_w4a8_lab.predict.machine_model import (
    BF16_BYTES,
    BF16_OPS,
    LINK_BYTES,
    MLA_HEADS,
    Cluster,
    Shapes,
    draft_step,
    fixed_weights,
    kimi,
    moe_shape,
)
from kimi_w4a8_lab.predict.predict import Fit, Load, median_chunk, predict, step_terms
from kimi_w4a8_lab.speed import published

from . import calibration, moe_time

# Kernels of a layer beside routed experts and all-reduces, counted in SGLang's DeepSeek model on AITER: two norms (with
# the residual); q and kv down, two norms of them, q up, key absorption, rotary, concatenation of q, and of k with the
# write to the pool, attention and its merge, value absorption, transpose, output; router, choice of experts; the shared
# expert's gate and up, SiLU, down, and the addition.
LAYER_KERNELS, DRAFT_KERNELS = 21, 18
HIDDEN_PASSES = 14  # reads and writes of a token's hidden vector by a layer's kernels in a prefill
# AITER's two-stage custom all-reduce, TP 8: 52.5 us at 7.34 MB on MI325X (aiter#1880), 6.4 us at 24 KB (vllm#39080).
# EAGLE recipes run RCCL instead, of which sglang#29313 says that it costs about as much there.
REDUCE_US, REDUCE_US_PER_MB = 6.3, 6.3
LINK_SHARE = 48 / 64  # usable share of a link's bandwidth (ROCm blog on RCCL and xGMI)
ATTENTION_TFLOPS = 330.0  # assumed, for both phases
_MODEL, _FITTED = "counted", "AITER's timings, proof/account/calibration.py"


class StepPart(str, Enum):
    """Part of a step or prefill that a change can reduce."""

    EXPERTS = "experts"
    ATTENTION = "attention"
    REDUCES = "all-reduces"
    OTHER = "other"


@dataclass(frozen=True)
class AccountRow:
    """Row of the account; uncertainty is a share of ms. Rows without launches share the launches of others."""

    name: str
    ms: float
    launches: int
    formula: str
    source: str
    uncertainty: float
    part: StepPart = StepPart.OTHER


@dataclass(frozen=True)
class Account:
    """Account of a load. Both lists end with the row "unexplained" and sum to `step_ms` and `prefill_ms`."""

    load: Load
    source: str
    step_ms: float
    prefill_ms: float
    step: list[AccountRow]
    prefill: list[AccountRow]


def explain(load: Load, fit: Fit, cluster: Cluster) -> Account:
    """Account for a load against its published figures, or against the fitted model if none are published."""
    shapes = kimi()
    step_ms, prefill_ms, source = _totals(load, fit, cluster)
    step, prompt = step_parts(load, cluster, shapes), prefill_parts(load, cluster, shapes)
    return Account(load, source, step_ms, prefill_ms, _with_rest(step, step_ms), _with_rest(prompt, prefill_ms))


def _totals(load: Load, fit: Fit, cluster: Cluster) -> tuple[float, float, str]:
    """Return the milliseconds of a step, those of one request's prefill, and their source."""
    sides = published.points().get(f"con{load.concurrency}")
    figures = (sides or {}).get("w4a8" if load.steps == 0 else "eagle3" if load.concurrency > 2 else "eagle3-opt")
    known = Load(load.concurrency, steps=3 if load.steps else 0, accept_length=load.accept_length)
    if sides is None or figures is None or load != known:
        alone = predict(replace(load, concurrency=1), "ttft_median_ms", fit, cluster)
        step_s = float(step_terms(load, cluster) @ fit.vector)
        return step_s * 1000, alone, "the fitted model (no published figures for this load)"
    waits = figures.get("ttft_median_ms", sides["w4a8"]["ttft_median_ms"])
    prefill_ms = waits / (1 + (load.concurrency - 1) / 2)
    if (itl := figures.get("itl_median_ms")) is not None:
        step_ms = itl * median_chunk(load.accept_length, load.steps)
    else:  # subtract what other requests' prefills add to TPOT
        token_ms = figures["tpot_median_ms"] - prefill_ms * (load.concurrency - 1) / 2 / (load.output_len - 1)
        step_ms = token_ms * figures.get("accept_length", 1.0)
    return step_ms, prefill_ms, published.load(published.MAIN)["source"]


def step_parts(load: Load, cluster: Cluster, shapes: Shapes) -> list[AccountRow]:
    """Return the parts of one target pass over steps + 1 tokens per request, and of the draft's steps."""
    s, tokens = shapes, load.concurrency * (load.steps + 1)
    context = load.input_len + load.output_len / 2
    rows = [*moe_rows(cluster, s, tokens), decode_attention(load, cluster, s)]
    fixed = fixed_weights(s, cluster.tp) * BF16_BYTES
    formula = f"{fixed / 1e9:.1f} GB / {moe_time.SMALL_TB_S} TB/s"
    rows.append(
        AccountRow("attention, shared, head weights", fixed / moe_time.SMALL_TB_S / 1e9, 0, formula, _MODEL, 0.2)
    )
    message = tokens * s.hidden * BF16_BYTES / 1e6
    us_per_mb = REDUCE_US_PER_MB * cluster.all_reduce_s(1) / Cluster().all_reduce_s(1)
    one_us, count = REDUCE_US + us_per_mb * message, 2 * s.layers
    formula = f"{count} x ({REDUCE_US} us + {message:.2f} MB x {us_per_mb} us)"
    rows.append(
        AccountRow("all-reduces", count * one_us / 1000, count, formula, "aiter#1880, MI325X", 0.4, StepPart.REDUCES)
    )
    rows.append(logits_gather(load, cluster, s))
    rows.append(_small(s.layers * LAYER_KERNELS, "other kernels"))
    if load.steps:
        launches = load.steps * DRAFT_KERNELS
        read = float(draft_step(load.concurrency, context, cluster)[1]) * cluster.gpu.hbm_tb_s / moe_time.SMALL_TB_S
        ms = launches * moe_time.SMALL_US / 1000 + load.steps * read * 1000
        formula = f"{launches} x {moe_time.SMALL_US} us + {load.steps} x {read * 1e6:.0f} us of weights and KV"
        rows.append(AccountRow("draft", ms, launches, formula, _MODEL, 0.4))
    return rows


def logits_gather(load: Load, cluster: Cluster, s: Shapes) -> AccountRow:
    """Return the gather of BF16 logits to every GPU, of the target and of each draft step, and its copies.

    Each GPU sends its part over every link. The parts are joined by a copy, and another one makes float32 of them.
    """
    rows = load.concurrency * (2 * load.steps + 1)  # of the target's tokens, and one of a request in each draft step
    logits = rows * s.vocab * BF16_BYTES
    gathers = load.steps + 1
    link_ms, copy_ms = logits / cluster.tp / LINK_BYTES / LINK_SHARE * 1000, 5 * logits / moe_time.SMALL_TB_S / 1e9
    formula = (
        f"{gathers} x 3 x {moe_time.SMALL_US} us + {logits / 1e6:.0f} MB / {cluster.tp} on each link, copied twice"
    )
    ms = 3 * gathers * moe_time.SMALL_US / 1000 + link_ms + copy_ms
    return AccountRow("logits gather", ms, 3 * gathers, formula, "counted in SGLang's logits processor", 0.4)


def decode_attention(load: Load, cluster: Cluster, s: Shapes, kv_bytes: float = BF16_BYTES) -> AccountRow:
    """Return MLA's decode attention: it reads KV once for all tokens of a request, and repeats heads up to 16."""
    context = load.input_len + load.output_len / 2
    kv = load.concurrency * context * s.layers * (s.kv_rank + s.rope) * kv_bytes
    heads = max(MLA_HEADS, s.heads // cluster.tp)
    flop = load.concurrency * (load.steps + 1) * context * s.layers * heads * 2 * (2 * s.kv_rank + s.rope)
    bounds = {
        f"{kv / 1e9:.1f} GB of KV / {_read_tb_s():.1f} TB/s": kv / _read_tb_s() / 1e9,
        f"{flop / 1e12:.2f} Tflop of {heads} heads / {ATTENTION_TFLOPS:.0f} TFLOPS": flop / ATTENTION_TFLOPS / 1e9,
    }
    formula = max(bounds, key=lambda name: bounds[name])
    return AccountRow("attention", bounds[formula], 0, formula, "counted; the rate is assumed", 0.3, StepPart.ATTENTION)


def _read_tb_s() -> float:
    return calibration.rates()[calibration.STAGE1].tb_s


def prefill_parts(load: Load, cluster: Cluster, shapes: Shapes) -> list[AccountRow]:
    """Return the parts of one request's prefill in one piece."""
    s, tokens = shapes, load.input_len
    linear = 2 * tokens * (fixed_weights(s, cluster.tp) - s.vocab * s.hidden / cluster.tp)
    attention = tokens**2 * s.layers * s.heads / cluster.tp * (s.nope + s.rope + s.v_head)
    reduced = 2 * s.layers * tokens * s.hidden * BF16_BYTES
    passes = s.layers * HIDDEN_PASSES * tokens * s.hidden * BF16_BYTES
    small = _small(s.layers * LAYER_KERNELS, "other kernels")
    formula = f"{small.formula} + {passes / 1e9:.0f} GB / {moe_time.SMALL_TB_S} TB/s"
    link = f"{reduced / 1e9:.0f} GB on {cluster.tp - 1} links at {LINK_SHARE * LINK_BYTES / 1e9:.0f} GB/s"
    products = calibration.rates()[calibration.BF16].share * BF16_OPS / 1e12
    gemm = f"{linear / 1e12:.0f} Tflop / {products:.0f} TFLOPS"
    scores = f"{attention / 1e12:.1f} Tflop / {ATTENTION_TFLOPS:.0f} TFLOPS"
    return [
        *moe_rows(cluster, s, tokens),
        AccountRow("dense matrix products", linear / products / 1e9, 0, gemm, _FITTED, 0.1),
        AccountRow("attention", attention / ATTENTION_TFLOPS / 1e9, 0, scores, "assumed", 0.4),
        AccountRow(
            "all-reduces",
            cluster.all_reduce_s(reduced) / LINK_SHARE * 1000,
            2 * s.layers,
            link,
            "ROCm blog, RCCL and xGMI",
            0.2,
            StepPart.REDUCES,
        ),
        replace(small, ms=small.ms + passes / moe_time.SMALL_TB_S / 1e9, formula=formula),
    ]


def moe_rows(cluster: Cluster, s: Shapes, tokens: int) -> list[AccountRow]:
    """Return the parts of all MoE layers with AITER's kernels."""
    return [
        AccountRow(
            f"MoE: {part.name}",
            s.moe_layers * part.us / 1000,
            s.moe_layers * part.launches,
            f"{s.moe_layers} x ({part.formula})",
            _FITTED,
            0.25,
            StepPart.EXPERTS,
        )
        for part in moe_time.aiter(cluster.gpu, moe_shape(s, cluster), tokens)
    ]


def _small(launches: int, name: str) -> AccountRow:
    formula = f"{launches} x {moe_time.SMALL_US} us"
    return AccountRow(
        name, launches * moe_time.SMALL_US / 1000, launches, formula, "SGLang's model; 3 to 9 us each", 0.4
    )


def _with_rest(rows: Sequence[AccountRow], total: float) -> list[AccountRow]:
    rest = total - sum(row.ms for row in rows)
    spread = sum((row.ms * row.uncertainty) ** 2 for row in rows) ** 0.5
    uncertainty = spread / max(abs(rest), 1e-9)
    return [*rows, AccountRow("unexplained", rest, 0, "total minus the rows above", "includes host work", uncertainty)]

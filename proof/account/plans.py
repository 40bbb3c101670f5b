"""Published figures, recipes and the machine's floor beside each other, and what is left to win on top of `agent`."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_w4a8_lab.predict.layouts import layout
from kimi_w4a8_lab.predict.machine_model import (
    BF16_BYTES,
    BF16_OPS,
    INT8_OPS,
    Cluster,
    decode_bytes,
    draft_bytes,
    expert_weights,
    fixed_weights,
)
from kimi_w4a8_lab.predict.predict import PRECISIONS

from . import calibration, moe_time, shares
from .levers import Change, ms, throughput
from .parts import LINK_SHARE, Account, StepPart
from .prefill import chunked_ms

_Saved = dict[str, tuple[float, float]]  # milliseconds of a prefill, and their uncertainty as a share


@dataclass(frozen=True)
class Plan:
    """One row. error_ms: of the prefill, from the uncertainties of what it saves."""

    name: str
    prefill_ms: float
    error_ms: float
    step_ms: float


@dataclass(frozen=True)
class Priced:
    """A change on top of `agent`, with what it needs and the verdict."""

    change: Change
    verdict: str


def plans(account: Account, cluster: Cluster, moe: Change) -> list[Plan]:
    """Return the rows; moe: the change to this package's MoE kernels. `agent` has shorter chunks than the others."""
    kernels: _Saved = {"MoE": (moe.prefill_ms, 0.25)}
    shared = kernels | shares.saved_parts(account, cluster)
    dense: _Saved = {"dense": (dense_ms(account, cluster), 0.3)}
    chunks: list[_Saved] = [{"chunks": (-_chunks_ms(account, cluster, name), 0.3)} for name in ("agent", "agent-fast")]
    step = account.step_ms - moe.step_ms
    return [
        Plan("published, by the account", account.prefill_ms, 0.0, account.step_ms),
        _plan("`eagle3` with the MoE kernels of this package", account, kernels, step),
        _plan("`agent`", account, shared | chunks[0], step),
        _plan("`agent-fast`", account, shared | dense | chunks[1], step),
        floor(account, cluster),
    ]


def _chunks_ms(account: Account, cluster: Cluster, recipe: str = "agent") -> float:
    return chunked_ms(account, cluster, layout(recipe).chunk) - chunked_ms(account, cluster, 16384)


def _plan(name: str, account: Account, saved: _Saved, step_ms: float) -> Plan:
    error = sum((part * uncertainty) ** 2 for part, uncertainty in saved.values()) ** 0.5
    return Plan(name, account.prefill_ms - sum(part for part, _ in saved.values()), error, step_ms)


def floor(account: Account, cluster: Cluster) -> Plan:
    """Return the peaks of the data sheet: products at full rate and links in full use in a prefill, bytes in a step."""
    s, load = cluster.shapes, account.load
    rows = {row.name: row for row in account.prefill}
    experts = load.input_len * s.top_k * expert_weights(s, cluster.tp) * 2 * s.moe_layers / INT8_OPS
    bf16 = calibration.rates()[calibration.BF16].share
    score = load.input_len**2 * s.layers * s.heads / cluster.tp * (s.nope + s.rope + s.v_head) / BF16_OPS
    prefill = (
        experts * 1000 + rows["dense matrix products"].ms * bf16 + score * 1000 + rows["all-reduces"].ms * LINK_SHARE
    )
    context, tokens = load.input_len + load.output_len / 2, load.steps + 1
    once = load.concurrency * context * s.layers * (s.kv_rank + s.rope) * BF16_BYTES
    read = decode_bytes(load.concurrency, tokens, 0, PRECISIONS[load.precision], cluster) + once
    read += load.steps * draft_bytes(load.concurrency, context, cluster)
    reduced = cluster.all_reduce_s(2 * s.layers * load.concurrency * tokens * s.hidden * BF16_BYTES)
    return Plan("floor: peaks of the data sheet", prefill, 0.0, (read / cluster.bandwidth + reduced) * 1000)


def dense_ms(account: Account, cluster: Cluster) -> float:
    """Return what FP8 weights and activations save of a prefill that shares attention's input.

    The router stays in BF16. Each product first reads its input and writes it in 8 bits. AITER's rate for FP8 is taken
    to be that of its INT8 products, because the matrix units have one peak for both.
    """
    s, rows = cluster.shapes, {row.name: row for row in account.prefill}
    weights = fixed_weights(s, cluster.tp) - s.vocab * s.hidden / cluster.tp
    kept = s.moe_layers * s.hidden * s.experts
    dense = rows["dense matrix products"].ms
    quantized = dense * (1 - kept / weights) - shares.saved_parts(account, cluster)["products"][0]
    rates = calibration.rates()
    faster = 1 - rates[calibration.BF16].share * BF16_OPS / (rates[calibration.INT8].share * INT8_OPS)
    inputs = (s.hidden + s.heads * s.v_head + s.expert_inner) / cluster.tp + s.q_rank + s.kv_rank + s.hidden
    written = s.layers * account.load.input_len * inputs * (BF16_BYTES + 1) / moe_time.SMALL_TB_S / 1e9
    return quantized * faster - written - 6 * s.layers * moe_time.SMALL_US / 1000


def dense_step_ms(cluster: Cluster) -> float:
    """Return by how much FP8 lengthens a step: five more small kernels in a layer, and a byte less of each weight.

    kv_b's absorbed halves, the router and the output head stay in BF16.
    """
    s = cluster.shapes
    kept = s.layers * s.kv_rank * s.heads / cluster.tp * (s.nope + s.v_head) + s.moe_layers * s.hidden * s.experts
    read = fixed_weights(s, cluster.tp) - kept - s.vocab * s.hidden / cluster.tp
    return 5 * s.layers * moe_time.SMALL_US / 1000 - read / moe_time.SMALL_TB_S / 1e9


def left(account: Account, cluster: Cluster) -> list[Priced]:
    """Return what is left on top of `agent`."""
    s, small = cluster.shapes, moe_time.SMALL_US / 1000
    links = ms(account.prefill, StepPart.REDUCES) - shares.saved_parts(account, cluster)["links"][0]
    passes = s.layers * account.load.input_len * s.hidden * BF16_BYTES / moe_time.SMALL_TB_S / 1e9
    reduces = 2 / (2 * s.layers) * ms(account.prefill, StepPart.REDUCES) / 2
    half = ms(account.step, StepPart.ATTENTION) / 2
    return [
        Priced(
            Change("transfers hidden behind compute (two half batches), at most", (), 0.0, links),
            "not built: SGLang overlaps two batches only with expert parallelism or DP attention, and half batches "
            "read the experts twice",
        ),
        Priced(
            Change(
                "dense products of prefills in FP8", ("env.KIMI_DENSE_FP8=prefill",), 0.0, dense_ms(account, cluster)
            ),
            "`agent-fast`: accuracy not judged",
        ),
        Priced(
            Change(
                "the same in all passes",
                ("env.KIMI_DENSE_FP8=all",),
                -dense_step_ms(cluster),
                dense_ms(account, cluster),
            ),
            "a setting, which frees memory",
        ),
        Priced(
            Change("norm and quantize in one kernel", (), 0.0, 2 * passes / cluster.tp + passes),
            "not built: SGLang has it for gfx942 before attention alone (`fp8_per_token`), where `agent-fast` would "
            "gain 0.6 ms",
        ),
        Priced(
            Change("chunks of 16,384 tokens", (), 0.0, _chunks_ms(account, cluster)),
            "`agent-fast`; not in `agent`: a longer chunk delays the next token of every running request",
        ),
        Priced(
            Change("QuickReduce in INT8 for the two all-reduces that are left", (), 0.0, reduces),
            "dropped: reduce-scatters and all-gathers replace all other all-reduces of a prefill",
        ),
        Priced(
            Change("verify attention in FP8 (a8w8)", (), half - small, 0.0),
            "not built: it needs an FP8 KV cache, whose accuracy is not judged",
        ),
    ]


def table_rows(account: Account, cluster: Cluster, moe: Change) -> tuple[list[list[str]], list[list[str]]]:
    """Return the cells of the plans and of what is left."""
    load, found = account.load, plans(account, cluster, moe)
    waits = 1 + (load.concurrency - 1) / 2
    base = throughput(load, found[0].step_ms, found[0].prefill_ms)[1]
    first = []
    for plan in found:
        tpot, rate = throughput(load, plan.step_ms, plan.prefill_ms)
        worse, ttft = throughput(load, plan.step_ms, plan.prefill_ms + plan.error_ms)[1], plan.prefill_ms * waits / 1000
        error, late = (f" ± {rate - worse:,.0f}", f" ± {plan.error_ms:.0f}") if plan.error_ms else ("", "")
        cells = f"{plan.prefill_ms:.0f}{late}", f"{plan.step_ms:.1f}", f"{tpot:.1f}", f"{ttft:.2f}"
        first.append([plan.name, *cells, f"{rate:,.0f}{error}", f"{rate / base:.2f}x"])
    agent = found[2]
    now = throughput(load, agent.step_ms, agent.prefill_ms)[1]
    second = []
    for priced in left(account, cluster):
        change = priced.change
        rate = throughput(load, agent.step_ms - change.step_ms, agent.prefill_ms - change.prefill_ms)[1]
        saved = [f"{-one:+.1f}" if one else "" for one in (change.prefill_ms, change.step_ms)]
        second.append([change.name, *saved, f"{rate / now - 1:+.1%}", priced.verdict])
    return first, second

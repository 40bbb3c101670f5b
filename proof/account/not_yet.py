"""`python -m proof.account.not_yet`: layouts of MI325X that cannot be served yet, and KV in host memory.

Prices are of 40 requests with 10,240 input tokens, by the fitted model and the account's rates. Nothing was run.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.memory_plan import make_plan
from kimi_w4a8_lab.predict.layouts import layout
from kimi_w4a8_lab.predict.machine_model import BF16_BYTES, Cluster, kimi
from kimi_w4a8_lab.predict.predict import Fit, Load, calibrate, predict, step_terms

from .layouts import OUTPUT
from .moe_time import SMALL_US
from .parts import REDUCE_US, REDUCE_US_PER_MB, decode_attention

LOAD = Load(40, steps=3, accept_length=2.7)
HOST_GB_S = 50.0  # of the 64 GB/s of PCIe 5.0 x16; assumed
CONVERSATION = 65536


@dataclass(frozen=True)
class Price:
    """Throughput and KV tokens of a node."""

    name: str
    tokens_per_s: float
    kv_tokens: int


def prices(fit: Fit) -> list[Price]:
    """Return `agent` and the layouts that cannot be served."""
    one, fp8, four = (layout("agent", *more) for more in ((), ("kv-cache-dtype=fp8_e4m3",), ("tp-size=4",)))
    cluster, s = Cluster(), kimi()
    attention = decode_attention(LOAD, cluster, s).ms
    saved = attention - decode_attention(LOAD, cluster, s, 1.0).ms
    return [
        Price("agent", rate(fit, 0.0), one.kv_tokens),
        Price("FP8 KV cache", rate(fit, saved), fp8.kv_tokens),
        Price("DCP 8", rate(fit, attention / 2 - dcp_ms()), 8 * one.kv_tokens),
        Price("4 GPUs prefill, 4 decode", split_rate(fit), four.kv_tokens),
    ]


def rate(fit: Fit, saved_ms: float) -> float:
    """Return the throughput when a step takes `saved_ms` less."""
    wave_s = LOAD.concurrency * OUTPUT / predict(LOAD, "output_throughput_tok_s", fit, Cluster())
    return LOAD.concurrency * OUTPUT / (wave_s - saved_ms / 1000 / LOAD.accept_length * (OUTPUT - 1))


def dcp_ms() -> float:
    """Return what a step takes longer with DCP: the queries of all heads are gathered, their outputs reduced."""
    s, tokens = kimi(), LOAD.concurrency * (LOAD.steps + 1)
    sizes = (tokens * s.heads * (s.kv_rank + s.rope) * BF16_BYTES, tokens * s.heads * s.kv_rank * BF16_BYTES)
    return s.layers * sum(REDUCE_US + REDUCE_US_PER_MB * size / 1e6 for size in sizes) / 1000


def split_rate(fit: Fit) -> float:
    """Return the throughput of four GPUs that prefill for four that decode: that of the slower side."""
    half = Cluster(tp=4)
    prompt_s = predict(Load(1, steps=3, accept_length=LOAD.accept_length), "ttft_median_ms", fit, half) / 1000
    token_s = float(step_terms(LOAD, half) @ fit.vector) / LOAD.accept_length
    return min(OUTPUT / prompt_s, LOAD.concurrency / token_s)


def returning(fit: Fit) -> dict[str, float]:
    """Return the seconds until a conversation that left the GPUs can go on, by where its KV comes from."""
    resolved = resolve(load_recipe("agent"))
    plan = make_plan(resolved.recipe, resolved.args, Cluster().gpu, Regime.UNKNOWN)
    draft = plan.draft_kv
    token = plan.target_kv.bytes_per_token + (draft.bytes_per_token if draft else 0)
    buffers = plan.target_kv.buffers + (draft.buffers if draft else 0)
    again = predict(Load(1, CONVERSATION, steps=3, accept_length=LOAD.accept_length), "ttft_median_ms", fit, Cluster())
    return {
        "computed again": again / 1000,
        "host memory, long runs of tokens": CONVERSATION * token / HOST_GB_S / 1e9,
        "host memory, one copy a token and layer": CONVERSATION * buffers * SMALL_US / 1e6,
    }


def main() -> None:
    """Print both tables."""
    fit = calibrate(Cluster())
    table = Table("layout", "tok/s", "KV tokens", title="40 requests of 10,240 tokens, accept length 2.7, by the model")
    for price in prices(fit):
        table.add_row(price.name, f"{price.tokens_per_s:,.0f}", f"{price.kv_tokens:,}")
    table_console().print(table)
    table = Table("KV", "seconds", title=f"a returning conversation of {CONVERSATION:,} tokens, `agent`")
    for name, seconds in returning(fit).items():
        table.add_row(name, f"{seconds:.1f}")
    table_console().print(table)


if __name__ == "__main__":
    main()

"""Milliseconds that a prefill saves when each rank computes its share of the rows around attention.

Counted in SGLang's input-scattered path with the plugin's hooks: of n ranks, each computes q_a and kv_a and both norms
of 1/n of the rows. An all-reduce is a reduce-scatter and an all-gather, of which the gather before attention carries
the latents instead of the hidden vector. The captured states and the last residual are gathered once more.
"""

from __future__ import annotations

from kimi_w4a8_lab.predict.machine_model import BF16_BYTES, Cluster, fixed_weights

from .moe_time import SMALL_TB_S
from .parts import Account

NORM_PASSES = 8  # two norms of a layer read and write the hidden vector and the residual
CAPTURED_LAYERS = 3


def saved_parts(account: Account, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return what is saved, and its uncertainty, of products, links and norms."""
    s, rows = cluster.shapes, {row.name: row for row in account.prefill}
    latents = s.q_rank + s.kv_rank + s.rope
    elsewhere = 1 - 1 / cluster.tp
    products, links = rows["dense matrix products"], rows["all-reduces"]
    gathered = (CAPTURED_LAYERS + 1 - s.layers * (1 - latents / s.hidden)) / (4 * s.layers)
    passes_ms = s.layers * NORM_PASSES * account.load.input_len * s.hidden * BF16_BYTES / SMALL_TB_S / 1e9
    return {
        "products": (products.ms * repeated_share(cluster) * elsewhere, products.uncertainty),
        "links": (-links.ms * gathered, links.uncertainty),
        "norms": (passes_ms * elsewhere, rows["other kernels"].uncertainty),
    }


def repeated_share(cluster: Cluster) -> float:
    """Return the share of a prefill's dense products that every rank repeats: q_a and kv_a."""
    s = cluster.shapes
    repeated = s.layers * s.hidden * (s.q_rank + s.kv_rank + s.rope)
    return repeated / (fixed_weights(s, cluster.tp) - s.vocab * s.hidden / cluster.tp)


def saved_ms(account: Account, cluster: Cluster) -> float:
    """Return the milliseconds of a prefill that are saved."""
    return sum(ms for ms, _ in saved_parts(account, cluster).values())

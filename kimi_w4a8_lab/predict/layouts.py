"""Layouts of one engine on a node with eight MI325X, and their KV pools by the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.arguments import attention_tp
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.memory_plan import make_plan

from .machine_model import DRAFT, Cluster

# DP attention takes an MLA draft, because an MHA draft keeps all heads on every GPU, and AITER's page offsets limit it.
DP_ATTENTION = (
    "draft.repo=lightseekorg/kimi-k2.5-eagle3-mla",
    "draft.card=kimi-k2.5-eagle3-mla",
    "enable-dp-attention=true",
    "load-balance-method=total_tokens",
    "chunked-prefill-size=16384",
    "max-running-requests=256",
    "options.least_accept_length=1.8",
)
GROUPS = (2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """A recipe with settings. chunk: tokens of a prefill batch. kv_tokens: of all pools."""

    name: str
    cluster: Cluster
    chunk: int
    kv_tokens: int


def layout(recipe: str, *settings: str) -> Layout:
    """Return the layout of a recipe with settings on MI325X."""
    resolved = resolve(load_recipe(recipe), settings)
    plan, args = make_plan(resolved.recipe, resolved.args, Cluster().gpu, Regime.UNKNOWN), resolved.args
    groups, draft = plan.tp // attention_tp(args), resolved.recipe.draft
    cluster = Cluster(tp=plan.tp, groups=groups, draft=draft.card if draft and draft.card else DRAFT)
    name = f"TP {plan.tp}" + (f", DP {groups}" if groups > 1 else "")
    return Layout(name, cluster, int(str(args["chunked-prefill-size"])) // groups, groups * plan.tokens)


def node_layouts() -> list[Layout]:
    """Return `agent` and DP attention on the same GPUs."""
    return [layout("agent"), *(layout("agent", *DP_ATTENTION, f"dp-size={count}") for count in GROUPS)]

"""Layouts of one node with eight MI325X: engines, GPUs of each, and their KV pools by the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.arguments import attention_tp
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.memory_plan import make_plan

from .machine_model import DRAFT, Cluster

NODE_GPUS = 8
RECIPES = ("agent", "agent-2x4", "throughput")
HOST_KV_BYTES, HOST_BYTES_S = 1.5e12, 40e9  # of a node with 2 TB, and of one GPU's PCIe 5 link; both assumed


@dataclass(frozen=True)
class Layout:
    """Engines of a recipe on one node; groups: of GPUs in an engine.

    pool, host: KV tokens of a group, on its GPUs and in host memory. chunk, max_running: of a group, too.
    draft: its card, because MLA drafts read less KV.
    """

    name: str
    recipe: str
    draft: str
    engines: int
    tp: int
    groups: int
    pool: int
    host: int
    host_tokens_s: float
    chunk: int
    max_running: int

    @property
    def kv_tokens(self) -> int:
        """KV tokens of the node's pools."""
        return self.engines * self.groups * self.pool

    @property
    def cluster(self) -> Cluster:
        """One engine of it."""
        return Cluster(tp=self.tp, groups=self.groups, draft=self.draft)

    @property
    def usable(self) -> bool:
        """False for a layout that no recipe starts, so that it is only priced."""
        return not self.host


def layout(recipe: str, *settings: str, host: bool = False) -> Layout:
    """Return a recipe's layout on MI325X; host: with KV in host memory, which no recipe switches on."""
    resolved = resolve(load_recipe(recipe), settings)
    plan, args = make_plan(resolved.recipe, resolved.args, Cluster().gpu, Regime.UNKNOWN), resolved.args
    engines, groups = resolved.recipe.options.replicas, plan.tp // attention_tp(args)
    name = f"{engines} x TP {plan.tp}" + (f", DP {groups}" if groups > 1 else "") + (", host KV" if host else "")
    cell = plan.budget.cell_bytes  # every GPU of a group keeps the same latent KV
    draft = resolved.recipe.draft
    return Layout(
        name,
        recipe,
        draft.card if draft and draft.card else DRAFT,
        engines,
        plan.tp,
        groups,
        plan.tokens,
        int(HOST_KV_BYTES / engines / plan.tp / cell) if host else 0,
        HOST_BYTES_S / cell,
        int(str(args["chunked-prefill-size"])) // groups,
        int(str(args["max-running-requests"])) // groups,
    )


def node_layouts() -> list[Layout]:
    """Return the layouts that `rank` ranks, the default first."""
    return [layout(recipe, host=host) for host in (False, True) for recipe in RECIPES]

"""Layouts of one node with eight MI325X: engines, GPUs of each, and their KV pools by the memory plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.recipe.arguments import attention_tp
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.memory_plan import make_plan

from .machine_model import DRAFT, Cluster

NODE_GPUS = 8
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
DELAYER = "enable-prefill-delayer=true"
GROUPS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Engines behind one router. groups: of GPUs in an engine, with requests of their own.

    Lengths are in tokens, pool, chunk and limits of a group; grain: tokens of a unit. context: of a prompt with its
    answer. delayed: `enable-prefill-delayer`. overlap: SGLang chooses a batch when the one before it begins. outside_s:
    times of requests outside of the scheduler, as in HTTP and the tokenizer, drawn by chance. seed: of these times, of
    the order of sessions, and of the users' starts.
    """

    engines: int = 1
    groups: int = 1
    pool: int
    chunk: int
    max_running: int
    grain: int = 64  # AgentX's block
    accept_length: float = 1.0
    prefix_cache: bool = True
    eagle: bool = False
    context: float = math.inf
    max_queued: int = sys.maxsize
    delayed: bool = False
    overlap: bool = False
    outside_s: Sequence[float] = (0.0,)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout(EngineSettings):
    """Engines of a recipe with settings on one node. draft: its card, because MLA drafts read less KV."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    draft: str
    tp: int

    @property
    def kv_tokens(self) -> int:
        """KV tokens of the node's pools."""
        return self.engines * self.groups * self.pool

    @property
    def longest(self) -> int:
        """Most tokens of a request with its answer."""
        return int(min(self.context, self.pool))

    @property
    def cluster(self) -> Cluster:
        """One engine of it."""
        return Cluster(tp=self.tp, groups=self.groups, draft=self.draft)

    @property
    def command(self) -> str:
        """Command that serves it."""
        return " ".join([f"kimi-w4a8 serve {self.recipe}", *(f"--set {setting}" for setting in self.settings)])


def layout(recipe: str, *settings: str) -> Layout:
    """Return the layout of a recipe with settings on MI325X."""
    resolved = resolve(load_recipe(recipe), settings)
    plan, args = make_plan(resolved.recipe, resolved.args, Cluster().gpu, Regime.UNKNOWN), resolved.args
    engines, groups = resolved.recipe.options.replicas, plan.tp // attention_tp(args)
    delayed = bool(args.get("enable-prefill-delayer"))
    name = f"{engines} x TP {plan.tp}" + (f", DP {groups}" if groups > 1 else "") + (", delayer" if delayed else "")
    draft = resolved.recipe.draft

    def number(setting: str) -> int:
        return int(str(args[setting]))

    return Layout(
        name=name, recipe=recipe, settings=settings, draft=draft.card if draft and draft.card else DRAFT,
        engines=engines, tp=plan.tp, groups=groups, pool=plan.tokens, delayed=delayed, overlap=True,
        chunk=number("chunked-prefill-size") // groups, max_running=number("max-running-requests") // groups,
        max_queued=number("max-queued-requests"), context=number("context-length"),
    )  # fmt: skip


def node_layouts() -> list[Layout]:
    """Return the layouts that `rank` ranks, the default first."""
    groups = [(*DP_ATTENTION, f"dp-size={count}") for count in GROUPS]
    return [
        layout("agent"),
        layout("agent-2x4"),
        *(layout("agent", *settings) for settings in groups),
        *(layout("agent", *settings, DELAYER) for settings in groups),
    ]

"""`kimi-w4a8 bench ab`: compare two or more sides, one server at a time, in an order that cancels drift.

The servers do not run together: eight GPUs hold one, and a second process would disturb the first. With two rounds the
order is A B B A, so that warming, throttling and a neighbour's load affect all sides alike. All sides get the same
prompts in each repetition. `bench sweep` compares each recipe with itself without its draft.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import UsageError
from kimi_w4a8_eagle3.recipe.schema import PLAIN, load_recipe

from ..base.server_under_test import Say, Target
from .single import Texts, measured
from .workloads import Workload


@dataclass(frozen=True)
class Plan:
    """A comparison. repeats: measurements of each workload and side, spread evenly over `rounds` server starts."""

    sides: Sequence[Target]
    workloads: Sequence[Workload]
    repeats: int
    rounds: int

    def __post_init__(self) -> None:
        names = [side.name for side in self.sides]
        if same := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two sides have the name {same[0]}", where="--a, --b", expected="different sides")
        if not 1 <= self.rounds <= self.repeats:
            raise UsageError(
                f"{self.repeats} repetition(s) in {self.rounds} round(s)",
                where="--repeats, --rounds",
                expected="at least one repetition in every round, and at least one round",
            )

    def blocks(self) -> list[tuple[Target, list[int]]]:
        """Return (side, repetition numbers) in measuring order; a block is one server start."""
        shares = [list(range(self.repeats))[start :: self.rounds] for start in range(self.rounds)]
        blocks: list[tuple[Target, list[int]]] = []
        for number, share in enumerate(shares):
            for side in self.sides if number % 2 == 0 else reversed(self.sides):
                if blocks and blocks[-1][0] is side:
                    blocks[-1][1].extend(share)
                else:
                    blocks.append((side, list(share)))
        return blocks


def ab(plan: Plan, texts: Texts, runs: Path, say: Say, resume: Path | None = None) -> Path:
    """Measure all sides and return the run directory: see `measured`."""
    name = "-".join(side.name for side in plan.sides).replace(":", "-")
    return measured("ab", name, plan.blocks(), plan.workloads, texts, runs, say, resume)


def with_and_without(recipe: str) -> list[str]:
    """Return the sides of a recipe: without its draft and with it, or alone if it has none or names its variant."""
    alone = recipe.endswith(PLAIN) or load_recipe(recipe).draft is None
    return [recipe] if alone else [f"{recipe}:plain", recipe]


def commands(
    sides: Sequence[str], workloads: Sequence[str], changes: Sequence[str], settings: Sequence[str]
) -> list[str]:
    """Return one command for each side and workload, and the one that joins their runs.

    changes: options that change the workloads.
    """
    given = [*changes, *(word for setting in settings for word in ("--set", setting))]
    runs = [shlex.join(["kimi-w4a8", "bench", "run", work, "-r", side, *given]) for side in sides for work in workloads]
    return [*runs, "kimi-w4a8 report runs/*"]

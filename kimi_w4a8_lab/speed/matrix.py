"""The matrix of `kimi-w4a8 bench sweep`: its sides, and its points as commands for other machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kimi_w4a8_eagle3.recipe.schema import VARIANTS, load_recipe


def with_and_without(recipe: str) -> list[str]:
    """Return the sides of a recipe: without its draft and with it, or alone if it has none or names its variant."""
    alone = recipe.rpartition(":")[2] in VARIANTS or load_recipe(recipe).draft is None
    return [recipe] if alone else [f"{recipe}:plain", recipe]


def commands(
    sides: Sequence[str], workloads: Sequence[str], changes: Sequence[str], settings: Sequence[str]
) -> list[str]:
    """Return one command for each side and workload, and the one that joins their runs.

    changes: options that change the workloads. A recipe of several engines is served first, in another terminal,
    because `bench` starts one engine only.
    """
    lines = []
    for side in sides:
        served = load_recipe(side).options.replicas > 1
        given = [word for setting in settings for word in ("--set", setting)]
        if served:
            lines.append(shlex.join(["kimi-w4a8", "serve", side, *given]) + "   # in another terminal")
            given = ["--base-url", "http://127.0.0.1:9527"]
        for work in workloads:
            lines.append(shlex.join(["kimi-w4a8", "bench", "run", work, "--recipe", side, *changes, *given]))
    return [*lines, "kimi-w4a8 report runs/*"]

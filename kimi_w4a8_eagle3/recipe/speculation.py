"""Draft settings of a launch: off, fixed, or adaptive with steps by batch size (`--speculative-adaptive`)."""

from __future__ import annotations

import json
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import read_text
from ..base.finding import Finding
from ..base.installed import operator_dir
from .arguments import Args, number
from .schema import Recipe


def apply_speculation(args: Args, recipe: Recipe, notes: list[Finding]) -> None:
    """Turn `options.speculation` into SGLang's arguments: "adaptive" adds a table of steps by batch size.

    SGLang reports its own limits on adaptive steps when it starts (`sglang_plugin/adaptive_hook.py`). Raises KimiError
    for "adaptive" without a draft, for an invalid file, and for a table that does not fit the recipe.
    """
    if recipe.options.speculation == "off":
        text = "options.speculation is 'off': the draft and the recipe's --speculative-* arguments are removed"
        notes.append(Finding(text))
        return
    if "speculative-algorithm" not in args:
        raise KimiError(
            f"options.speculation = 'adaptive' does not fit the recipe {recipe.name!r}",
            expected="a recipe with a draft",
        )
    packaged = operator_dir("launch/adaptive") / ("mi325x.json" if recipe.hardware.gpus else "cpu.json")
    table = Path(str(args.setdefault("speculative-adaptive-config", str(packaged))))
    steps, reserved = _steps(table), int(number(args, "speculative-num-steps", 0))
    if max(steps) != reserved:
        raise KimiError(
            f"the table goes up to {max(steps)} draft steps, the recipe to {reserved}",
            where=f"{table}, speculative-num-steps",
            expected="the same number, because KV slots, logits and known faults follow the recipe's draft tokens",
        )
    args["speculative-adaptive"] = True
    if args.get("device") == "cpu":
        args["disable-cuda-graph"] = True  # SGLang would capture GPU graphs for each number of steps
    text = f"options.speculation, {', '.join(map(str, sorted(steps)))} steps by {table.name}"
    notes.append(Finding(f"--speculative-adaptive: {text}"))


def _steps(table: Path) -> set[int]:
    text = read_text(table, "the table of draft steps")
    try:
        rows = json.loads(text)
        steps = {int(step) for batch, row in rows.items() if batch.isdigit() for step in row["candidate_steps"]}
    except (ValueError, TypeError, KeyError, AttributeError):
        steps = set()
    if not steps or min(steps) < 0:
        raise KimiError(
            "not a table of draft steps", where=str(table), expected='{"1": {"candidate_steps": [1, 3]}, ...}'
        )
    return steps

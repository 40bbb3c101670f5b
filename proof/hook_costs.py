"""`python -m proof.hook_costs`: host time of the plugin's hooks in a greedy step with EAGLE3, on a CPU engine.

The engine serves the built-in model. Other programs of the machine lengthen most steps, so the figures are those of the
fastest tenth of the steps, hook by hook, and of all hooks together. The goals are for what the plugin adds to a step:

- One hook replaces SGLang's own pass over the logits, which runs in its place in every second step.
- The hooks of prefills are called in the model's pass, which on a GPU is the replay of a graph in a step.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.engine.process import Program, free_port
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render

GOALS = {1: 40.0, 34: 80.0}  # microseconds that the plugin adds to a step, by requests in the batch
ADDED, IN_GRAPHS = "added", ("input_scattered.", "dense_fp8.")
OWN = "SGLang's own pass over the logits"  # as in proof.timed_hooks, which imports sglang
STEPS = 60  # verify steps of each request, at least


def costs(folder: Path) -> dict[int, dict[str, float]]:
    """Return the microseconds of each hook in a step, by the requests in the batch."""
    launch = render(load_recipe("tiny"), [f"port={free_port()}", "context-length=8192"])
    file = folder / "steps"
    launch.env["HOOK_COSTS"] = str(file)
    engine = launch.engine(folder / "log")
    assert isinstance(engine.command, Program)
    engine.command = Program("proof.timed_hooks", (engine.command.module, *engine.command.arguments))
    found = {}
    with engine as server, EngineClient(*server.address) as client:
        server.wait_ready(280.0)
        for requests in GOALS:
            file.write_text("")
            questions = [f"Count to {90 + number}." for number in range(requests)]
            client.chat_all(questions, 4 * STEPS, requests, ignore_eos=True)
            found[requests] = _tenths(file, requests)
    return found


def _tenths(file: Path, requests: int) -> dict[str, float]:
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    full = [spent for batch, spent in steps if batch == requests][1:]
    own = _tenth([spent[OWN] for spent in full if OWN in spent])
    ours = [spent for spent in full if OWN not in spent]
    called = [sum(ns for name, ns in spent.items() if not name.startswith(IN_GRAPHS)) for spent in ours]
    found = {"all": _tenth([sum(spent.values()) for spent in ours]), ADDED: _tenth(called) - own, OWN: own}
    for name in {name for spent in ours for name in spent}:
        found[name] = _tenth([spent.get(name, 0) for spent in ours])
    return {name: us for name, us in found.items() if us}


def _tenth(nanoseconds: list[int]) -> float:
    return quantiles(nanoseconds, n=10)[0] / 1000


def main() -> int:
    """Print the costs beside the goals; 1 means that one is missed."""
    with TemporaryDirectory() as folder:
        found = costs(Path(folder))
    rows = defaultdict[str, dict[int, float]](dict)
    for requests, spent in found.items():
        for name, us in spent.items():
            rows[name][requests] = us
    table = Table("hook", *(f"us, {requests} requests" for requests in GOALS), title="host time of a greedy step")
    for name, by_load in sorted(rows.items(), key=lambda row: -max(row[1].values())):
        table.add_row(name, *(f"{by_load.get(requests, 0):.1f}" for requests in GOALS))
    table.add_row("goal", *(f"{goal:.0f}" for goal in GOALS.values()))
    table_console().print(table)
    return int(any(found[requests][ADDED] > goal for requests, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())

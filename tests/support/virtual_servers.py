"""Servers of the built-in model on the virtual node: SGLang's HIP path with the arguments of recipe `agent`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kimi_w4a8_eagle3.engine.process import EngineServer, Program
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, resolve
from kimi_w4a8_laptop import virtual

from .sglang_program import environment
from .tiny_servers import running, tiny_launch

AGENT = resolve(load_recipe("agent"))
# What the node does not take from the recipe, or has otherwise. A test compares it with the recipe.
LEFT_OUT = {
    "model-path": "the built-in model",
    "speculative-draft-model-path": "the built-in draft",
    "trust-remote-code": "the built-in model has no code of its own",
    "tp-size": "a layout names its ranks",
    "host": "a free port of this machine",
    "port": "a free port of this machine",
    "numa-node": "the recipe derives it from a node's sockets",
    "mem-fraction-static": "the recipe derives it from a GPU's memory; max-total-tokens bounds the pool here",
    "context-length": "8192: tables of 131,072 tokens a request take a CPU's time",
    "max-running-requests": "8, 16 or 40: a CPU computes the rows of the largest graph",
    "cuda-graph-max-bs-decode": "a layout lists its graphs, because a capture takes seconds",
    "env.SGLANG_NUMA_BIND_V2": "it binds to the sockets of numa-node",
}
# A collective that a rank does not join ends after dist-timeout seconds.
OWN = (
    "device=cuda", "max-total-tokens=8192", "max-running-requests=8", "cuda-graph-bs-decode=[4,8]", "dist-timeout=120",
)  # fmt: skip


def settings() -> tuple[str, ...]:
    """Return what an engine on the node takes from the recipe, and what the node adds."""
    taken = {**AGENT.args, **{f"env.{name}": value for name, value in AGENT.recipe.environment.items()}}
    return (*(f"{name}={_text(value)}" for name, value in taken.items() if name not in LEFT_OUT), *OWN)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def virtual_launch(speculate: bool, more: tuple[str, ...] = ()) -> Launch:
    return tiny_launch(speculate, (*settings(), *more))


@contextmanager
def virtual_server(
    speculate: bool, folder: Path, *more: str, newest: bool = False, module: str | None = None, **environ: str
) -> Iterator[EngineServer]:
    """Start a server and wait for it. module: a program of the tests that plants something and runs the server."""
    launch = virtual_launch(speculate, more)
    path = environment(newest)["PYTHONPATH"]
    launch = replace(launch, env={**launch.env, **virtual.ENVIRONMENT, "PYTHONPATH": path, **environ})
    folder.mkdir(parents=True, exist_ok=True)
    engine = launch.engine(folder / "server.log")
    assert not isinstance(engine.command, Program)
    words = tuple(engine.command[engine.command.index("-m") + 1 :])
    engine.command = Program(module, words) if module else Program(*words[:1], words[1:])
    with running(engine) as server:
        try:
            yield server
        finally:  # a failing test shows what the engine refused
            print(*re.findall(r"^.*\wError: .*$", (folder / "server.log").read_text(), re.MULTILINE)[-2:], sep="\n")

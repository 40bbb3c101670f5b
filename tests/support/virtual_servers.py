"""Servers of the built-in model on the virtual node: SGLang's HIP path with the arguments of recipe `agent`.

The KV pool, the batch and the graphs are small. SGLang makes graphs of prefills with torch.compile, so there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kimi_w4a8_eagle3.engine.process import EngineServer, Program
from kimi_w4a8_laptop import virtual

from .sglang_program import environment
from .tiny_servers import running, tiny_launch

SETTINGS = (
    "device=cuda", "attention-backend=aiter", "disable-radix-cache=false", "disable-custom-all-reduce=true",
    "chunked-prefill-size=8192", "max-queued-requests=256", "max-total-tokens=8192", "max-running-requests=8",
    "cuda-graph-bs-decode=[1,4,8]", "disable-prefill-cuda-graph=true", "watchdog-timeout=1800",
)  # fmt: skip


@contextmanager
def virtual_server(
    speculate: bool, folder: Path, *settings: str, newest: bool = False, module: str | None = None, **environ: str
) -> Iterator[EngineServer]:
    """Start a server and wait for it. module: a program of the tests that plants something and runs the server."""
    launch = tiny_launch(speculate, (*SETTINGS, *settings))
    path = environment(newest)["PYTHONPATH"]
    launch = replace(launch, env={**launch.env, **virtual.ENVIRONMENT, "PYTHONPATH": path, **environ})
    folder.mkdir(parents=True, exist_ok=True)
    engine = launch.server(folder / "server.log")
    words = tuple(launch.command[launch.command.index("-m") + 1 :])
    engine.command = Program(module, words) if module else Program(*words[:1], words[1:])
    with running(engine) as server:
        yield server

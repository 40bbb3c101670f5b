"""Real SGLang servers of the built-in model for end-to-end tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from kimi_w4a8_eagle3.base.http import bearer
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import EngineServer, Program, free_port
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render

Server = TypeVar("Server", EngineServer, FrontedEngine)
READY_S = 280.0
_CORES = sorted(os.sched_getaffinity(0))  # a container may have others than the first ones
# Without a core for each rank SGLang wants as many NUMA nodes as ranks.
TWO_RANKS = ("args.tp=2", f"env.SGLANG_CPU_OMP_THREADS_BIND={_CORES[0]}|{_CORES[-1]}")

TEXT = "Tom has 3 apples and buys 4 more. How many apples?"
QUESTION = {
    "model": "kimi-k2.5-tiny",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 12,
    "temperature": 0,
    "chat_template_kwargs": {"thinking": False},  # its answer has no near tie at any token
}


def ask(server: FrontedEngine | EngineServer, **more: object) -> httpx.Response:
    """Ask the gateway, or an engine that has none."""
    headers = bearer(server.secret if isinstance(server, EngineServer) else None)
    url = f"{server.base_url}/v1/chat/completions"
    return httpx.post(url, json={**QUESTION, **more}, headers=headers, timeout=280)


def tiny_launch(speculate: bool = True, settings: tuple[str, ...] = ()) -> Launch:
    """The tiny recipe on a free port, with or without its draft.

    The context is an eighth of the recipe's, because a prompt that fills all of it takes a CPU minutes.
    """
    words = [f"port={free_port()}", "context-length=8192", *settings]
    return render(load_recipe("tiny" if speculate else "tiny:plain"), words)


def at_gpu(first: int) -> tuple[str, ...]:
    """The settings of an engine whose first GPU is this one, on a node of eight GPUs beside two sockets.

    SGLang reads them on a CPU, too. It looks up the cores of a rank by the GPU, where it would take a NUMA node's.
    """
    cores = "|".join([str(_CORES[-1])] * 8)
    bound = (f"env.SGLANG_CPU_OMP_THREADS_BIND={cores}",) if first else ()
    return f"base-gpu-id={first}", "numa-node=[0,0,0,0,1,1,1,1]", *bound


def started(launch: Launch, folder: Path) -> Iterator[FrontedEngine]:
    """Start engine and gateway, wait, yield, stop: the body of a fixture."""
    with running(launch.server(folder / "server.log")) as server:
        yield server


def alone(launch: Launch, folder: Path) -> Iterator[EngineServer]:
    """The same without a gateway."""
    with running(launch.engine(folder / "server.log")) as engine:
        yield engine


def with_faults(launch: Launch, module: str, folder: Path) -> Iterator[EngineServer]:
    """An engine as a program that a module of the tests runs after it has planted faults."""
    with running(faulty_engine(launch, module, folder)) as server:
        yield server


def faulty_engine(launch: Launch, module: str, folder: Path) -> EngineServer:
    engine = launch.engine(folder / "server.log")
    assert isinstance(engine.command, Program)
    engine.command = Program(module, (engine.command.module, *engine.command.arguments))
    return engine


def flush_cache(server: FrontedEngine | EngineServer) -> bool:
    """Ask once; SGLang refuses until the last request has left."""
    return httpx.post(f"{server.address.url}/flush_cache", headers=bearer(server.address.key)).is_success


@contextmanager
def running(engine: Server) -> Iterator[Server]:
    with engine as server:
        server.wait_ready(READY_S)
        yield server
        server.stop(0.5)  # a graceful end takes SGLang six seconds; it is tested where it matters

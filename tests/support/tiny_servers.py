"""Real SGLang servers of the built-in model for end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kimi_w4a8_eagle3 import serving
from kimi_w4a8_eagle3.recipes import Launch, load_recipe, render
from kimi_w4a8_eagle3.server import EngineServer, free_port

READY_S = 280.0


def tiny_launch(speculate: bool = True, settings: tuple[str, ...] = ()) -> Launch:
    """The tiny recipe on a free port, with or without its draft."""
    recipe = load_recipe("tiny")
    if not speculate:
        recipe = recipe.without_speculation()
    return render(recipe, [f"port={free_port()}", *settings])


def started(launch: Launch, folder: Path) -> Iterator[EngineServer]:
    """Start, wait, yield, stop: the body of a fixture."""
    yield from running(serving.engine(launch, folder / "server.log"))


def running(engine: EngineServer) -> Iterator[EngineServer]:
    """The same for an engine whose command the test has changed."""
    with engine as server:
        server.wait_ready(READY_S)
        yield server
        server.stop(0.5)  # a graceful end takes SGLang six seconds; it is tested where it matters

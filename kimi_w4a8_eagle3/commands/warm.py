"""`kimi-w4a8 warm`: compile the gfx942 kernels of a model's MoE, Kimi-K2.5's by default, before serving."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import typer
from rich.console import Console
from rich.progress import track

from ..base.console import table_console
from ..base.errors import KimiError, UsageError
from ..base.installed import require
from ..gates import read_gates
from ..moe.contract import MoeShape
from ..quark.weight_format import FORMATS, INT4
from ..recipe.arguments import number
from ..recipe.memory_plan import ModelCard
from ..recipe.schema import load_recipe
from .options import RECIPE


def warm(
    objects: Path | None = typer.Option(None, "--objects", help="Folder of the code objects; default: KIMI_KERNELS."),
    jobs: int = typer.Option(0, "--jobs", min=0, help="Compiler processes; default: one per core."),
    model: Path | None = typer.Option(None, "--model", help="Folder of a checkpoint; default: Kimi-K2.5."),
    recipe: str | None = RECIPE,
    tp: list[int] = typer.Option([8, 4], "--tp", min=1, help="Tensor-parallel sizes; a recipe has its own."),
    ep: int = typer.Option(1, "--ep", min=1, help="Expert-parallel size, a divisor of each --tp."),
) -> None:
    """Compile the MoE kernels ahead of serving; needs no GPU.

    FlyDSL and a linker for gfx942 are needed. The kernels that serve without gates come first, for W4A8 and MXFP4
    checkpoints. W4A8 then gets all gates and tiles, including those of `kimi-w4a8 tune-moe`. Objects already in the
    folder are kept.
    """
    if any(ranks % ep for ranks in tp):
        raise UsageError(f"--ep {ep} does not divide --tp {tp}", "--ep", "a divisor of each --tp")
    require("flydsl", "torch")
    from ..moe.flydsl.backend import FlydslBackend  # start-up: torch
    from ..moe.flydsl.kernels.candidates import every_kernel
    from ..moe.flydsl.kernels.warm import warm as compile_objects
    from ..moe.flydsl.objects import objects_folder

    console, start = table_console(), time.monotonic()
    card = ModelCard.packaged("kimi-k2.5-w4a8")
    if recipe:
        served = load_recipe(recipe)
        path, revision = str(served.args.get("model-path", served.model.repo)), served.model.revision
        card = ModelCard.of(path, revision, str(served.model.card or card.name))
        tp, ep = [number(served.args, "tp-size", 1)], number(served.args, "ep-size", 1)
    card = ModelCard.from_directory(model) if model else card
    text = card.config.get("text_config", card.config)
    try:
        experts, hidden, top_k = text["n_routed_experts"], text["hidden_size"], text["num_experts_per_tok"]
        sizes = [text["moe_intermediate_size"] * ep // ranks for ranks in tp]
    except KeyError as error:
        raise KimiError(f"config.json lacks {error}", card.name, expected="a model with routed experts") from None
    shapes = [
        MoeShape(experts // ep, hidden, inter, top_k, weights=stored) for stored in FORMATS.values() for inter in sizes
    ]
    wanted = [config for shape in shapes for config in FlydslBackend().wanted(shape)]
    wanted += [config for shape in shapes if shape.weights == INT4 for config in every_kernel(shape)]
    folder = objects or objects_folder(read_gates(os.environ))
    manifest, compiled = compile_objects(wanted, folder, jobs, shown)
    console.print(
        f"flydsl: {len(set(wanted))} kernels for {manifest.arch} in {folder}, {compiled} of them compiled now, "
        f"in {time.monotonic() - start:.0f} s",
        soft_wrap=True,
    )


def shown(done: Iterable[Any], count: int, every_s: float = 10.0) -> Iterator[Any]:
    """Yield the compiled kernels, and show how many there are: a bar, or in a log a line now and then."""
    console, began, ended, number = Console(stderr=True, highlight=False), time.monotonic(), Event(), 0
    if console.is_terminal:
        yield from track(done, "compiling", count, console=console)
        return

    def say() -> None:
        while not ended.wait(every_s):  # also while no kernel is finished
            console.print(f"compiling: {number} of {count} kernels after {time.monotonic() - began:.0f} s")

    Thread(target=say, daemon=True).start()
    try:
        for number, kernel in enumerate(done, 1):  # noqa: B007 `say` reads it
            yield kernel
    finally:
        ended.set()

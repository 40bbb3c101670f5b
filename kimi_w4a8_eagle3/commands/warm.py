"""`warm`: compile the MoE kernels ahead of serving: gfx942 to code objects, other GPUs into Triton's cache."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import track
from rich.table import Table

from ..base.console import table_console
from ..base.errors import KimiError, UsageError
from ..gates import Gates, read_gates
from ..moe.contract import MoeShape
from ..moe.dispatch import AUTO, BACKENDS, gpu_arch
from ..recipe.launch import load_recipe, resolve
from ..recipe.memory_plan import ModelCard
from ..recipe.schema import Recipe
from .options import RECIPE, RECIPE_NAME, one_recipe

if TYPE_CHECKING:
    from ..moe.flydsl.configs import KernelConfig
    from ..moe.flydsl.objects import Manifest

KIMI, ALL_TP = "kimi-k2.5-w4a8", (8, 4)  # what is compiled without a recipe


def warm(
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    objects: Path | None = typer.Option(None, "--objects", help="Folder of the code objects; default: KIMI_KERNELS."),
    jobs: int = typer.Option(0, "--jobs", min=0, help="Processes that compile code objects; default: one a core."),
    arch: str = typer.Option("", "--arch", help="gfx942, sm_90, ...; default: this machine's GPU, else the recipe's."),
    tp: int = typer.Option(0, "--tp", min=0, help="Tensor-parallel size; default: the recipe's."),
    moe_backend: str = typer.Option("auto", "--moe-backend", help="flydsl, triton, or auto for what would serve."),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE, as for `kimi-w4a8 serve`."),
    model: Path | None = typer.Option(None, "--model", help="Read the target's config.json in this directory."),
) -> None:
    """Compile the MoE kernels ahead of serving; needs no GPU, but FlyDSL and a linker for gfx942.

    Without a recipe: the gfx942 code objects of Kimi-K2.5 for TP 8 and 4, whatever the gates and the tiles, those of
    `kimi-w4a8 tune-moe` included. With one: what its server can ask for. That server inherits this environment and the
    recipe's variables win, so kernel gates count from both. What the folder has is not compiled again.
    """
    import torch  # start-up: torch, which --help does without

    wanted = one_recipe(name, recipe, default="")
    if not wanted:
        given = [
            name for name, value in (("--arch", arch), ("--tp", tp), ("--set", settings), ("--model", model)) if value
        ]
        if given or moe_backend not in (AUTO, "flydsl"):
            raise UsageError(
                "without a recipe, `kimi-w4a8 warm` compiles the gfx942 code objects of Kimi-K2.5 for TP 8 and 4",
                where=" ".join(given) or "--moe-backend",
                remedy="name a recipe",
            )
        return _warm_everything(objects, jobs)
    chosen = resolve(load_recipe(wanted), settings).recipe
    if chosen.engine != "sglang":
        raise UsageError(
            f"the recipe {chosen.name!r} serves with {chosen.engine}, which uses none of these kernels",
            where="--recipe",
            expected="a W4A8 recipe for SGLang",
        )
    arch = arch or gpu_arch(torch.device("cuda")) or next(iter(chosen.hardware.arch), "")
    if not arch:
        raise UsageError(
            f"the recipe {chosen.name!r} runs on a CPU: there is nothing to compile", remedy="name a recipe for GPUs"
        )
    if moe_backend not in (AUTO, *BACKENDS):
        raise UsageError(f"no MoE backend {moe_backend!r}", where="--moe-backend", expected=", ".join(BACKENDS))
    kernel_gates = read_gates({**os.environ, **chosen.environment})
    backend = next(name for name in (moe_backend, kernel_gates.moe_backend, _would_serve(arch)) if name != AUTO)
    shape = _shape(chosen, tp, model)

    if backend == "flydsl":
        from ..moe.flydsl.backend import FlydslBackend  # start-up: torch

        flydsl = FlydslBackend(kernel_gates)
        problem = f"the FlyDSL kernels are for gfx942, not {arch}" if arch != "gfx942" else flydsl.shape_problem(shape)
        if problem:
            raise KimiError(problem, where=f"recipe {chosen.name}, {shape}", remedy="--moe-backend triton")
        _warm_flydsl(flydsl.wanted(shape), objects, kernel_gates, jobs)
    elif backend == "triton":
        start = time.monotonic()
        count = _warm_triton(shape, arch)
        table_console().print(
            f"triton: {count} kernels for {arch}, {shape}, in {time.monotonic() - start:.0f} s", soft_wrap=True
        )


def _would_serve(arch: str) -> str:
    """dispatch's choice on a GPU of this architecture."""
    return "flydsl" if arch == "gfx942" else "triton"


def _warm_everything(objects: Path | None, jobs: int) -> None:
    """Every gfx942 kernel of Kimi-K2.5; what serves without any gate comes first."""
    from ..moe.flydsl.backend import FlydslBackend  # start-up: torch
    from ..moe.flydsl.tune import every_kernel

    shapes = [_shape_of(ModelCard.packaged(KIMI), tp) for tp in ALL_TP]
    first = [config for shape in shapes for config in FlydslBackend().wanted(shape)]
    _warm_flydsl(
        [*first, *(config for shape in shapes for config in every_kernel(shape))], objects, read_gates(os.environ), jobs
    )


def _shape(recipe: Recipe, tp: int, model: Path | None) -> MoeShape:
    """The MoE of one rank, from the checkpoint's config.json or the recipe's model card."""
    if model is not None:
        card = ModelCard.from_directory(model)
    elif recipe.model.card is not None:
        card = ModelCard.packaged(recipe.model.card)
    else:
        raise KimiError(f"the recipe {recipe.name!r} names no model card", remedy="--model DIR with a config.json")
    return _shape_of(card, tp or int(str(resolve(recipe).args.get("tp-size", 1))))


def _shape_of(card: ModelCard, tp: int) -> MoeShape:
    config = card.config.get("text_config", card.config)
    try:
        experts, hidden, inter, top_k = (
            int(config[key])
            for key in ("n_routed_experts", "hidden_size", "moe_intermediate_size", "num_experts_per_tok")
        )
    except KeyError as error:
        raise KimiError(
            f"the model's config has no {error}", where=card.name, expected="a DeepSeek-V3 style MoE"
        ) from None
    if inter % tp:
        raise UsageError(
            f"moe_intermediate_size {inter} cannot be split over {tp} ranks", "--tp", f"a divisor of {inter}"
        )
    return MoeShape(experts, hidden, inter // tp, top_k)


def _warm_triton(shape: MoeShape, arch: str) -> int:
    from ..moe.triton.compile import compile_moe, warm_tokens  # optional: triton

    return len(compile_moe(shape, arch, warm_tokens("triton", arch, shape)))


def _warm_flydsl(configs: list[KernelConfig], objects: Path | None, gates: Gates, jobs: int) -> None:
    from ..moe.flydsl.objects import objects_folder  # start-up: torch
    from ..moe.flydsl.warm import default_jobs
    from ..moe.flydsl.warm import warm as compile_objects

    console, start = table_console(), time.monotonic()

    def watch(finished: Iterable[Any], count: int) -> Iterable[Any]:
        return track(finished, "compiling", count, console=console)

    folder = objects or objects_folder(gates)
    manifest, compiled = compile_objects(configs, folder, jobs or default_jobs(), watch)
    console.print(_table(configs, manifest))
    console.print(
        f"flydsl: {len(set(configs))} kernels for {manifest.arch} in {folder}, {compiled} of them compiled now, "
        f"in {time.monotonic() - start:.0f} s",
        soft_wrap=True,
    )


def _table(configs: Iterable[KernelConfig], manifest: Manifest) -> Table:
    """What each kind of kernel takes, at most."""
    kinds = defaultdict(list)
    for config in dict.fromkeys(configs):
        kernel = manifest.kernels[repr(config)]
        kinds[kernel.symbol].append((kernel.vgprs, kernel.agprs, kernel.sgprs, kernel.spills, kernel.lds_bytes))
    table = Table("kernel", "objects", "VGPR", "AGPR", "SGPR", "spills", "LDS B")
    for symbol, rows in kinds.items():
        table.add_row(symbol, str(len(rows)), *(f"{max(column)}" for column in zip(*rows, strict=True)))
    return table

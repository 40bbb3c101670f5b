"""`kimi warm`: compile the MoE kernels of a recipe ahead of serving, so that the first request does not wait."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from ..base.errors import KimiError
from ..gates import Gates, read_gates
from ..moe.contract import MoeShape
from ..moe.dispatch import AUTO, BACKENDS, gpu_arch
from ..recipe.launch import load_recipe, resolve
from ..recipe.memory_plan import ModelCard
from ..recipe.schema import Recipe


def warm(
    recipe: str = typer.Option(..., "--recipe", "-r", help="Name of a packaged recipe, or a TOML file."),
    arch: str = typer.Option("", "--arch", help="gfx942, sm_90, ...; default: this machine's GPU, else the recipe's."),
    tp: int = typer.Option(0, "--tp", min=0, help="Tensor-parallel size; default: the recipe's."),
    moe_backend: str = typer.Option("auto", "--moe-backend", help="flydsl, triton, or auto for what would serve."),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE, as for `kimi serve`."),
    model: Path | None = typer.Option(None, "--model", help="Read the target's config.json in this directory."),
) -> None:
    """Compile every MoE kernel that the recipe's server can ask for into the compilers' own caches; needs no GPU.

    The server inherits this environment and the recipe's variables win, so kernel gates count from both.
    """
    import torch  # start-up: torch, which --help does without

    chosen = resolve(load_recipe(recipe), settings).recipe
    if chosen.engine != "sglang":
        raise KimiError(
            f"the recipe {chosen.name!r} serves with {chosen.engine}, which uses none of these kernels",
            where="--recipe",
            expected="a W4A8 recipe for SGLang",
        )
    arch = arch or gpu_arch(torch.device("cuda")) or next(iter(chosen.hardware.arch), "")
    if not arch:
        raise KimiError(f"the recipe {chosen.name!r} runs on a CPU: there is nothing to compile", where="--recipe")
    if moe_backend not in (AUTO, *BACKENDS):
        raise KimiError(f"there is no MoE backend {moe_backend!r}", where="--moe-backend", expected=", ".join(BACKENDS))
    kernel_gates = read_gates({**os.environ, **chosen.environment})
    backend = next(name for name in (moe_backend, kernel_gates.moe_backend, _would_serve(arch)) if name != AUTO)
    shape = _shape(chosen, tp, model)

    console, start = Console(), time.monotonic()
    count = 0
    if backend == "flydsl":
        count = _warm_flydsl(shape, arch, kernel_gates)
    elif backend == "triton":
        count = _warm_triton(shape, arch)
    console.print(
        f"{backend}: {count} kernels for {arch}, {shape}, in {time.monotonic() - start:.0f} s", soft_wrap=True
    )


def _would_serve(arch: str) -> str:
    """dispatch's choice on a GPU of this architecture."""
    return "flydsl" if arch == "gfx942" and find_spec("flydsl") else "triton"


def _shape(recipe: Recipe, tp: int, model: Path | None) -> MoeShape:
    """The MoE of one rank, from the checkpoint's config.json or the recipe's model card."""
    if model is not None:
        card = ModelCard.from_directory(model)
    elif recipe.model.card is not None:
        card = ModelCard.packaged(recipe.model.card)
    else:
        raise KimiError(f"the recipe {recipe.name!r} names no model card", remedy="--model DIR with a config.json")
    config = card.config.get("text_config", card.config)
    tp = tp or int(str(resolve(recipe).args.get("tp-size", 1)))
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
        raise KimiError(f"moe_intermediate_size {inter} cannot be split over {tp} ranks", where="--tp")
    return MoeShape(experts, hidden, inter // tp, top_k)


def _warm_triton(shape: MoeShape, arch: str) -> int:
    from ..moe.triton.compile import compile_moe, warm_tokens  # optional: triton

    return len(compile_moe(shape, arch, warm_tokens("triton", arch, shape)))


def _warm_flydsl(shape: MoeShape, arch: str, gates: Gates) -> int:
    try:
        from ..moe.flydsl.warm import warm as compile_flydsl  # optional: flydsl
    except ImportError as error:
        raise KimiError(f"FlyDSL kernels cannot be compiled: {error}", remedy="pip install flydsl==0.4.2") from error
    return compile_flydsl(shape, arch, gates)

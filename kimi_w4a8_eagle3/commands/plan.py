"""`kimi-w4a8 plan`: a recipe's memory per GPU, and the verdict of the page-offset guard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.table import Column, Table

from ..base.console import table_console
from ..base.errors import UsageError
from ..machine.aiter_regime import detect_regime, installed_regime
from ..machine.hardware import Machine, gpu_by_name
from ..recipe.arguments import require_parsed
from ..recipe.launch import load_recipe, missing_gpus, resolve, unmet_requirements
from ..recipe.memory_plan import MemoryPlan, ModelCard, make_plan, short_pool
from ..recipe.schema import one_recipe
from .options import RECIPE, RECIPE_NAME

INPUT_LEN, OUTPUT_LEN = 10240, 512  # the published workload
WORKLOAD = f"{INPUT_LEN:,}+{OUTPUT_LEN}"
FRACTIONS = (0.80, 0.85, 0.90)


def plan(
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    gpu: str = typer.Option(
        "", "--gpu", help="mi308x, mi300x, mi325x, mi350x or mi355x, several with commas; default: this machine's."
    ),
    tp: int = typer.Option(0, "--tp", min=0, help="GPUs to split over; default: the recipe's."),
    settings: list[str] = typer.Option([], "--set", help="As for `kimi-w4a8 serve`."),
    model: Path | None = typer.Option(None, "--model", help="Read the target's config.json in this directory."),
    draft: Path | None = typer.Option(None, "--draft", help="Read the draft's config.json in this directory."),
    aiter: str = typer.Option("", "--aiter", help="Plan for this AITER version instead of the installed one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show memory per GPU, KV capacity and the page guard's verdict.

    They follow from configs alone. With --gpu A,B it prints one row for each GPU model. It needs no GPU.
    """
    if tp:
        settings = [*settings, f"tp-size={tp}"]
    resolved = resolve(load_recipe(one_recipe(name, recipe)), settings)
    chosen, args = resolved.recipe, resolved.args
    if resolved.untested:
        require_parsed(args)
    machine = Machine.detect()
    if aiter:
        machine = replace(machine, installed={**machine.installed, "aiter": aiter})
    found = [gpu_by_name(model_name) for model_name in gpu.split(",")] if gpu else [machine.gpu] if machine.gpu else []
    if not found and chosen.hardware.reference:
        found = [gpu_by_name(chosen.hardware.reference)]
    if not found:
        raise UsageError(
            f"the recipe {chosen.name!r} uses no GPU, so no memory can be planned", remedy="name a recipe for GPUs"
        )
    regime = detect_regime(aiter) if aiter else installed_regime()
    cards = [ModelCard.from_directory(path) if path else None for path in (model, draft)]
    plans = [make_plan(chosen, args, model_gpu, regime, *cards) for model_gpu in found]
    if len(plans) > 1:
        if as_json:
            typer.echo(json.dumps([as_dict(row) for row in plans], indent=2))
        else:
            _compare(plans, chosen.hardware.arch)
        return
    result = plans[0]
    faults = resolved.faults(machine, result.gpu)
    if as_json:
        content = as_dict(result) | {"known_faults": [fault.model_dump(exclude_defaults=True) for fault in faults]}
        typer.echo(json.dumps(content, indent=2))
    else:
        _print(result)
        if args.get("mem-fraction-static") == "auto":
            typer.echo(f"ceiling: {chosen.options.memory_ceiling:g} of the memory (options.memory_ceiling)")
        problems = unmet_requirements(chosen, machine) if machine.devices else [missing_gpus(chosen, machine)]
        for problem in filter(None, [short_pool(result, args), *problems]):
            table_console().print(f"warning: {problem}", markup=False)
        for fault in faults:
            text = f"known fault {fault.id} ({fault.verdict}): {fault.sentence}; {fault.remedy}"
            table_console().print(text, markup=False)


def as_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as plain data; sizes in bytes."""
    verdict = plan.verdict
    return {
        "recipe": plan.recipe,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "hbm_bytes": plan.gpu.hbm_bytes,
        "segments": plan.segments,
        "weight_bytes": plan.budget.weight_bytes,
        "kv_bytes_per_token": plan.budget.cell_bytes,
        "kv_tokens": plan.tokens,
        "requests": {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN, "count": plan.requests(INPUT_LEN, OUTPUT_LEN)},
        "guard": {
            "aiter": verdict.regime.value,
            "kernels": [
                {"name": k.name, "row_elements": k.row_elements, "max_tokens": k.max_tokens(plan.budget.page_size)}
                for k in plan.kernels
            ],
            "limit_tokens": verdict.limit,
            "binding": verdict.binding.name if verdict.binding else None,
            "mem_fraction_static": verdict.fraction,
            "max_total_tokens": verdict.max_total_tokens,
        },
        "fractions": [
            {
                "mem_fraction_static": fraction,
                "tokens": plan.sizing.tokens(fraction),
                "tokens_that_fit": plan.budget.tokens(fraction),
                "safe": verdict.safe(plan.sizing.tokens(fraction)),
                "guard_gains_tokens": plan.tokens - plan.sizing.tokens(fraction),
            }
            for fraction in FRACTIONS
        ],
    }


def _compare(plans: list[MemoryPlan], archs: list[str]) -> None:
    console = table_console()
    numbers = [
        Column(name, justify="right") for name in ("HBM GiB", "weights GiB", "KV tokens", f"requests {WORKLOAD}")
    ]
    table = Table("", "arch", *numbers, "limit", title=f"{plans[0].recipe}, TP {plans[0].tp}: one GPU of each")
    for plan in plans:
        sizes = f"{plan.gpu.hbm_gib:.0f}", f"{plan.budget.weight_bytes / 2**30:.1f}", f"{plan.tokens:,}"
        requests = str(plan.requests(INPUT_LEN, OUTPUT_LEN))
        table.add_row(plan.gpu.name, plan.gpu.arch, *sizes, requests, _limit(plan))
    console.print(table)
    other = sorted({plan.gpu.arch for plan in plans} - set(archs))
    if other:
        console.print(f"{', '.join(other)}: memory only; the recipe is for {', '.join(archs)}")


def _limit(plan: MemoryPlan) -> str:
    return plan.verdict.binding.name if plan.verdict.binding else "memory"


def _print(plan: MemoryPlan) -> None:
    console = table_console()
    numbers = [Column(name, justify="right") for name in ("GiB", "share")]
    table = Table("part", *numbers, title=f"{plan.recipe} on {plan.gpu.name}, TP {plan.tp}: memory of one GPU")
    for part, size in plan.segments.items():
        table.add_row(part, f"{size / 2**30:.2f}", f"{size / plan.gpu.hbm_bytes:.1%}")
    table.add_row("HBM", f"{plan.gpu.hbm_gib:.2f}", "100.0%", style="bold", end_section=True)
    console.print(table)
    verdict = plan.verdict
    console.print(
        f"KV cache: {plan.budget.cell_bytes:,} bytes per token, {plan.tokens:,} tokens = "
        f"{plan.requests(INPUT_LEN, OUTPUT_LEN)} requests of {WORKLOAD}"
    )
    for kernel in plan.kernels:
        limit = kernel.max_tokens(plan.budget.page_size)
        reach = "no limit" if limit is None else f"{limit:,} tokens"
        console.print(f"  {kernel.name} ({kernel.row_elements:,} elements per row): {reach}")
    console.print(
        f"guard: AITER {verdict.regime.value}; --mem-fraction-static {verdict.fraction:g} "
        f"--max-total-tokens {verdict.max_total_tokens} ({_limit(plan)} binds)"
    )
    for row in as_dict(plan)["fractions"]:
        state = "within the limit" if row["safe"] else "OVERFLOWS"
        made = f"  at {row['mem_fraction_static']:.2f} SGLang makes {row['tokens']:,} tokens, {state}"
        console.print(f"{made}; guard: {row['guard_gains_tokens']:+,}")

"""The built-in model in BF16, INT4 (W4A8) and MXFP4 (with INT8 activations): right answers and accept length.

    python -m proof.figures.mxfp4 [--problems 1000] [--served 65]

AMD Quark quantizes the BF16 model to MXFP4. Every model answers held-out problems in plain torch with the kernels'
arithmetic, and the draft walks over the replies of the two quantized ones. Then SGLang serves the MXFP4 model with the
draft and without it, and the greedy answers are compared. Exit code 1 when a token differs.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.engine.client import EngineClient
from kimi_w4a8_eagle3.fleet.serve import signals_raise
from kimi_w4a8_lab.base.counters import accepted
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_laptop import tiny

from ..tiny.checkpoint import load_draft, load_target
from ..tiny.dialogues import FORMS
from ..tiny.generate import converse
from ..tiny.problems import problems
from ..tiny.tokenizer import load_tokenizer
from ..tiny.train_draft import acceptance

MAX_TOKENS, CONCURRENCY, SEED, DRAFT_TOKENS = 192, 8, 6, 4


def quantize(folder: Path) -> Path:
    """The MXFP4 target, made by the command."""
    words = [sys.executable, "-m", "kimi_w4a8_eagle3.cli", "quantize", "w4a8-target", str(tiny.target_bf16_path())]
    subprocess.run([*words, str(folder), "--format", "mxfp4"], check=True, stderr=subprocess.DEVNULL)
    return folder


def answered(name: str, folder: Path, count: int) -> str:
    """Return a line of the table: right answers in the form `think` and, of a quantized target, the accept length."""
    form, rng = FORMS["think"], random.Random("think")
    asked = [form(problem, rng) for problem in problems("held_out", count)]
    model = load_target(folder)
    replies = converse(model, load_tokenizer(folder), asked)
    right = sum(reply.right for reply in replies)
    length = ""
    if name != "BF16":
        exchanges = [exchange for reply in replies for exchange in reply.exchanges]
        length = f", accept length {acceptance(model, load_draft(tiny.draft_path(), model), exchanges)[0].value:.3f}"
    return f"{name}: {right} of {count} right ({right / count:.1%}){length}"


def served(settings: tuple[str, ...], questions: list[str], log: Path) -> tuple[list[tuple[int, ...]], float]:
    """Return the greedy answers of a server, and the accept length that its counters give; NaN without a draft."""
    with (
        Target(recipe="tiny", settings=settings).running(log, print) as server,
        EngineClient(server.base_url) as client,
    ):
        ask = partial(client.chat_all, questions, MAX_TOKENS, CONCURRENCY)
        answers, found = accepted(server.base_url, DRAFT_TOKENS, ask)
    return [answer.token_ids for answer in answers], found.length if found else math.nan


def main(
    count: int = typer.Option(1000, "--problems", min=1, help="Held-out problems for each model in plain torch."),
    asked: int = typer.Option(65, "--served", min=0, help="Held-out problems asked of each server; 0 starts none."),
) -> None:
    """Print the shares of right answers, the accept lengths and the comparison of the served answers."""
    torch.set_num_threads(2)
    console = Console(highlight=False)
    questions, same = [problem.question for problem in problems("held_out", max(asked, 1), seed=SEED)], asked
    with signals_raise(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mxfp4 = quantize(folder / "mxfp4")
        if asked:
            settings = (f"model.repo={mxfp4}",)
            drafted, length = served(settings, questions, folder / "drafted.log")
            _, int4 = served((), questions, folder / "int4.log")
            alone, _ = served((*settings, "options.speculation=off"), questions, folder / "alone.log")
            same = sum(a == b for a, b in zip(drafted, alone, strict=True))
            console.print(f"served, EAGLE3: accept length {length:.3f} with MXFP4, {int4:.3f} with INT4")
            console.print(f"served, MXFP4 with and without EAGLE3: the same tokens in {same} of {asked} answers")
        for title, target in {"MXFP4": mxfp4, "INT4": tiny.target_path(), "BF16": tiny.target_bf16_path()}.items():
            console.print(answered(title, target, count))
    raise typer.Exit(0 if same == asked else 1)


if __name__ == "__main__":
    run(lambda: typer.run(main))

"""The built-in model with its BF16 draft, with what `quantize fp8-draft` makes of it, and with that one's scales
scrambled: accept length and tokens. A broken draft must cost speed and no token. Then its projections rounded to INT8
and INT4, and what a draft of those widths would save of the bytes that Kimi-K2.5 reads on a GPU of eight.

    python -m proof.figures.fp8_draft [--questions 65]

Exit code 1 when a token differs. Five servers one after the other, about three minutes on 2 cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.fleet.serve import signals_raise
from kimi_w4a8_eagle3.recipe.memory_plan import ModelCard, draft_weights
from kimi_w4a8_lab.predict.machine_model import PRECISIONS, Cluster, decode_bytes, draft_bytes
from kimi_w4a8_laptop import tiny

from ..tiny.problems import problems
from .mxfp4 import SEED, served


def quantize(folder: Path) -> Path:
    """The FP8 draft, made by the command."""
    words = [sys.executable, "-m", "kimi_w4a8_eagle3.cli", "quantize", "fp8-draft", str(tiny.draft_path()), str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder


def scramble(draft: Path, folder: Path) -> Path:
    """A copy whose scales are off by random powers of two, from 1/8 to 8."""
    shutil.copytree(draft, folder)
    file = folder / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if name.endswith("weight_scale"):
            weights[name] = value * torch.exp2(torch.randint(-3, 4, value.shape, generator=generator)).to(value)
    save_file(weights, file)
    return folder


def rounded(draft: Path, folder: Path, bits: int) -> Path:
    """A copy whose projections were rounded to integers of `bits` bits, one scale a row; `fc` and `lm_head` stay."""
    shutil.copytree(draft, folder)
    file, most = folder / "model.safetensors", 2 ** (bits - 1) - 1
    weights = load_file(file)
    for name, value in weights.items():
        if name.endswith("proj.weight"):
            scale = value.float().abs().amax(1, keepdim=True) / most
            weights[name] = ((value.float() / scale).round() * scale).to(value)
    save_file(weights, file)
    return folder


def saved(requests: int, bits: int) -> tuple[float, float]:
    """Bytes that 3 draft steps save with projections of `bits` bits, and what they and the verify step read."""
    cluster, steps, context = Cluster(), 3, 10240 + 256
    draft = ModelCard.packaged("kimi-k2.5-eagle3")
    narrow = replace(draft, bits={"draft layer": bits})
    less = steps * (draft_weights(draft, cluster.tp)["draft"] - draft_weights(narrow, cluster.tp)["draft"])
    whole = decode_bytes(requests, steps + 1, context, PRECISIONS["w4a8"], cluster)
    return less, whole + steps * draft_bytes(requests, context, cluster)


def main(questions: int = typer.Option(65, min=1, help="Held-out problems asked of each server.")) -> None:
    """Serve the three drafts and print the table."""
    asked = [problem.question for problem in problems("held_out", questions, seed=SEED)]
    console, table = Console(highlight=False), Table("draft", "accept length", "answers with the same tokens")
    with signals_raise(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fp8 = quantize(folder / "fp8")
        drafts = {"BF16": tiny.draft_path(), "FP8": fp8, "FP8, scales scrambled": scramble(fp8, folder / "scrambled")}
        drafts |= {f"INT{bits} weights": rounded(drafts["BF16"], folder / str(bits), bits) for bits in (8, 4)}
        answers: dict[str, list[tuple[int, ...]]] = {}
        for number, (title, draft) in enumerate(drafts.items()):
            with console.status(f"{title}: {questions} questions"):
                answers[title], length = served((f"draft.repo={draft}",), asked, folder / f"{number}.log")
            same = sum(a == b for a, b in zip(answers["BF16"], answers[title], strict=True))
            table.add_row(title, f"{length:.3f}", f"{same} of {questions}")
    console.print(table)
    for concurrency, bits in product((2, 40), (8, 4)):
        less, whole = saved(concurrency, bits)
        console.print(f"concurrency {concurrency}, INT{bits}: {less / 1e6:.0f} MB of {whole / 1e9:.1f} GB a step")
    raise typer.Exit(0 if all(tokens == answers["BF16"] for tokens in answers.values()) else 1)


if __name__ == "__main__":
    run(lambda: typer.run(main))

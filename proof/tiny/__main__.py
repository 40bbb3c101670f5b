"""`python -m proof.tiny`: make the built-in model from nothing, or check the one in the package."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.accuracy.problems import FILE, MOST
from kimi_w4a8_laptop import tiny

from .typed import EXAMINATION, examination

app = typer.Typer(no_args_is_help=True, help="The built-in model: make it, or check the one in the package.")


@app.command("build")
def build(
    work: Path = typer.Option(Path("runs/tiny"), "--work", help="Where intermediate results go."),
    threads: int = typer.Option(1, "--threads", min=1, help="CPU threads for torch."),
) -> None:
    """Train, quantize and evaluate the built-in model and its draft; replaces the package's when all checks pass.

    Exit status 1 when a check fails; the package's weights are then left as they were.
    """
    import torch

    from .build import build as run

    torch.set_num_threads(threads)
    console = Console()
    with _progress(console) as progress:
        result = run(work, progress)
    console.print(result.table())
    raise typer.Exit(0 if result.ok else 1)


@app.command("continue")
def continue_(
    work: Path = typer.Option(Path("runs/tiny-continued"), "--work", help="Where results go."),
    first: Path = typer.Option(tiny.WEIGHTS, "--from", help="Start from these weights instead of the package's."),
) -> None:
    """Train target and draft further, as `build` does from nothing; replace the package's when all checks pass.

    A stopped run goes on from its last saved step. Exit status 1 when a check fails; the new weights are then in
    WORK/weights, from which a run with another --work can go on.
    """
    import torch

    from .build import continue_build

    torch.set_num_threads(1)
    console = Console()
    with _progress(console) as progress:
        result = continue_build(work, first, progress)
    console.print(result.table())
    raise typer.Exit(0 if result.ok else 1)


@app.command("typed")
def typed(
    thinking: bool = typer.Option(True, "--thinking/--instant", help="With or without thinking."),
    checkpoint: Path | None = typer.Option(None, "--checkpoint", help="Another target than the package's."),
    texts: Path = typer.Option(EXAMINATION, "--texts", help="Texts to ask; proof/tiny/blind.jsonl is the blind test."),
) -> None:
    """Ask the package's W4A8 target everything in proof/tiny/typed.jsonl, and print what it got wrong.

    Plain torch, no server. Exit status 1 when a share is below its bar.
    """
    import torch

    from .checkpoint import load_target
    from .evaluate import MIN_RIGHT_TYPED, asked_share, examined, shares
    from .tokenizer import load_tokenizer

    torch.set_num_threads(1)
    folder = checkpoint or tiny.target_path()
    replies = examined(load_target(folder), load_tokenizer(folder), thinking, examination(texts))
    for asked, reply in replies:
        if not asked.accepts(reply):
            print(f"{asked.kind}: {asked.text!r}, expected {asked.answer or 'the honest reply'}: {reply!r}")
    found = shares(replies)
    print(", ".join(f"{kind} {share:.1%}" for kind, share in found.items()))
    raise typer.Exit(0 if min(asked_share(found), found["other"]) >= MIN_RIGHT_TYPED else 1)


@app.command("mla-draft")
def mla_draft(
    folder: Path = typer.Option(Path("runs/tiny/mla-draft"), "--to", help="Where the new draft goes."),
    first: Path | None = typer.Option(None, "--from", help="Start from this MLA draft instead of from nothing."),
    dialogues: int = typer.Option(4000, "--dialogues", min=12, help="Conversations to train on."),
    epochs: int = typer.Option(3, "--epochs", min=1, help="Passes over them."),
    problems: int = typer.Option(100, "--problems", min=1, help="Number of held-out problems, in every form."),
    seed: int = typer.Option(30360, "--seed"),
) -> None:
    """Train a draft with latent attention for the package's target as it is.

    Exit status 1 when a check fails; the draft is there all the same, to be trained on with --from.
    """
    import torch

    from .build import train_mla_draft
    from .train_draft import DraftTraining

    torch.set_num_threads(1)
    console = Console()
    with _progress(console) as progress:
        training = DraftTraining(seed=seed, dialogues=dialogues, epochs=epochs, typed=0.0)
        found = train_mla_draft(folder, progress, training, problems, first)
    for name, (value, bar, passed) in found.items():
        console.print(f"{name}: {value}, bar {bar}: {'pass' if passed else 'FAIL'}", highlight=False)
    raise typer.Exit(0 if all(passed for _, _, passed in found.values()) else 1)


@app.command("problems")
def problems_file() -> None:
    """Write eval/problems.jsonl: the first held-out problems, which `kimi-w4a8 eval` and `bench` send."""
    from .problems import problems

    rows = ({"question": problem.question, "answer": problem.solution} for problem in problems("held_out", MOST))
    (operator_dir("eval") / FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@app.command("check")
def check(
    problems: int = typer.Option(100, "--problems", min=1, help="Number of held-out problems."),
    threads: int = typer.Option(1, "--threads", min=1, help="CPU threads for torch."),
) -> None:
    """Answer held-out problems with the package's target in BF16 and W4A8 and measure the draft's accept length.

    Plain torch, no server. Exit status 1 when a check fails.
    """
    import torch

    from .evaluate import evaluate

    torch.set_num_threads(threads)
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("held-out problems", total=8 * problems)
        result = evaluate(
            tiny.target_path(),
            tiny.target_bf16_path(),
            tiny.draft_path(),
            problems,
            lambda n: progress.advance(task, n),
        )
    console.print(result.table())
    raise typer.Exit(0 if result.ok else 1)


@app.command("tower")
def tower(
    work: Path = typer.Option(Path("runs/tiny"), "--work", help="Where intermediate results go."),
    pictures: int = typer.Option(400, "--pictures", min=1, help="Held-out pictures, and problems with one."),
    threads: int = typer.Option(1, "--threads", min=1, help="CPU threads for torch."),
) -> None:
    """Train the vision tower for the package's target, put it into both checkpoints, and see how well it reads.

    To be repeated when the target's embeddings have changed; the text weights stay as they are.
    """
    import torch

    from .build import renew_tower
    from .sight import sight

    torch.set_num_threads(threads)
    console = Console()
    with _progress(console) as progress:
        renew_tower(work, progress)
    console.print(sight(tiny.target_path(), pictures))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


if __name__ == "__main__":
    run(app)

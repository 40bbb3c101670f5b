"""`kimi-w4a8 draft`: train a draft on the traffic of one's own servers, compare it, and switch to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kimi_w4a8_eagle3.base.collection import CONSENT, Consent, key_name, read_consent
from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.run_dir import new_run_dir
from kimi_w4a8_eagle3.commands.options import RUNS
from kimi_w4a8_eagle3.gateway.key_file import read_keys
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_eagle3.supervision.checks import fingerprint, local_folder

from ..base.request_progress import request_progress
from ..draft import collected
from ..draft import switch as links
from ..draft.collected import Collected
from ..draft.kinds import overall
from ..report import page
from .groups import expanded, signals

if TYPE_CHECKING:
    from ..draft.compare import Judge
    from ..draft.eagle3 import Draft

_HELP = """A draft for your traffic: collect, train, compare, switch.

Exit codes of `compare`: 0 better for a kind of traffic and worse for none; 3 worse for one; 5 no difference shown.
"""
app = typer.Typer(no_args_is_help=True, help=_HELP)
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of collected requests.")


@dataclass(frozen=True)
class Of:
    """Conversations and the recipe whose target wrote them."""

    recipe: str = typer.Option(..., "--recipe", "-r", help="Recipe of the target; its draft is the first or old one.")
    settings: list[str] = typer.Option([], "--set", help="An engine argument or a dotted recipe key.")
    kinds: list[str] = typer.Option([], "--kind", help="Only these kinds of requests; default: all.")
    longest: int = typer.Option(4096, "--longest", min=16, help="Leave out conversations of more tokens.")
    most: int = typer.Option(10**9, "--most", min=2, help="Take only so many conversations, the newest.")

    def launch(self) -> Launch:
        launch = render(load_recipe(self.recipe), self.settings)
        if launch.draft is None:
            raise UsageError("the recipe has no draft", f"--recipe {self.recipe}", "a recipe with [draft]")
        return launch

    def conversations(self, folder: Path) -> list[Collected]:
        _require_collection(folder)
        return collected.read_collected(folder, self.longest, self.kinds)[-self.most :]


@app.command("collect", epilog="Example: kimi-w4a8 draft collect FOLDER --share 0.1")
def collect(
    folder: Path = FOLDER,
    share: float | None = typer.Option(None, "--share", min=0, max=1, help="Collect this share of all requests."),
    key_file: list[Path] = typer.Option([], "--key-file", help="Collect all requests with the key in this file."),
    off: bool = typer.Option(False, "--off", help="Stop collecting; what is collected stays."),
    most_gb: float | None = typer.Option(None, "--most-gb", min=0.001, max=1e6, help="Limit of an engine's files; 1."),
    most_of_key: float | None = typer.Option(None, "--most-of-key", min=0.01, max=1, help="Of it for a key; 0.5."),
    most_days: float | None = typer.Option(None, "--most-days", min=0.01, help="Remove requests after; default 30."),
    source: Path | None = typer.Option(None, "--from", help='Import a .jsonl of {"prompt": [ids], "answer": [ids]}.'),
    kind: str = typer.Option("imported", "--as", help="With --from: name of this kind of traffic."),
) -> None:
    """Switch collecting on or off, import, or show what is there.

    Engines with KIMI_COLLECT=FOLDER follow within seconds. Only token ids are stored. Requests with pictures are left
    out.
    """
    if off:
        _require_collection(folder)
    keys = tuple(_names(key_file)) or None
    changes = {"share": share, "most_of_key": most_of_key, "most_days": most_days, "keys": keys}
    changes |= {"most_bytes": int(most_gb * 1e9) if most_gb else None, **({"share": 0.0, "keys": ()} if off else {})}
    new = {name: value for name, value in changes.items() if value is not None}
    rows = collected.read_ids(source, kind) if source else []
    if new or source:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        consent = read_consent(folder) if (folder / CONSENT).exists() else Consent()
        replace(consent, **new).write(folder)  # type: ignore[arg-type]
    if source:
        typer.echo(f"{collected.store_ids(rows, folder, kind)} requests imported as {kind}")
    consent = read_consent(folder)
    whom = f"{consent.share:.0%} of all requests" + (f", all of {len(consent.keys)} keys" if consent.keys else "")
    typer.echo(f"collecting: {whom if consent.share or consent.keys else 'off'}")
    size = f"{consent.most_bytes / 1e9:g} GB an engine, {consent.most_of_key:.0%} of it a key"
    typer.echo(f"limits: {size}, {consent.most_days:g} days")
    for name, count, nbytes in collected.summarized(folder):
        typer.echo(f"{name}: {count} requests, {nbytes / 1e6:.1f} MB")


@app.command("erase", epilog="Example: kimi-w4a8 draft erase FOLDER --kind chat")
def erase(
    folder: Path = FOLDER,
    request: list[str] = typer.Option([], "--request", help="Remove the request with this id, which its answer has."),
    key_file: list[Path] = typer.Option([], "--key-file", help="Remove all requests with the key in this file."),
    kind: list[str] = typer.Option([], "--kind", help="Remove all requests of this kind."),
) -> None:
    """Remove collected requests, with the states captured from them.

    A draft trained on them stays as it is.
    """
    if not (request or key_file or kind):
        raise UsageError("nothing to erase was named", expected="--request, --key-file or --kind")
    _require_collection(folder)
    kinds = {*kind, *_names(key_file)}
    typer.echo(f"{collected.erase(folder, kinds, request)} requests erased")


def _names(key_files: list[Path]) -> list[str]:
    """Return the folders' names of all keys in these files."""
    return [key_name(key) for file in key_files for key in read_keys(file).values()]


@app.command("states", epilog="Example: kimi-w4a8 draft states FOLDER --recipe agent")
@expanded
def states(
    *,
    folder: Path = FOLDER,
    of: Of,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show sizes only."),
    runs: Path = RUNS,
) -> None:
    """Capture the target's hidden states of collected conversations.

    SGLang's prefill computes them. The same command continues a stopped run.
    """
    from ..draft.capturing import capture  # start-up: torch
    from ..draft.checkpoint import draft_sizes
    from ..draft.states import capture_plan

    console, launch = table_console(), of.launch()
    target, first = _folders(launch)
    plan = capture_plan(folder, of.conversations(folder), draft_sizes(first, target), fingerprint(target))
    console.print(
        f"{len(plan.missing)} conversations to capture, {plan.done} are there; {plan.tokens:,} tokens of "
        f"{plan.token_bytes / 1000:.1f} kB: {plan.nbytes / 1e9:.2f} GB"
    )
    if dry_run or not plan.missing:
        return
    log = new_run_dir("draft-states", runs) / "engine.log"
    console.print(f"engine's log: {log}", soft_wrap=True)
    with signals(runs), request_progress("tokens", plan.tokens, console) as show:
        capture(launch, plan, read_consent(folder).tokenizer, log, lambda done: show(done, ""))
    console.print(f"captured {len(plan.missing)} conversations in {plan.folder}", soft_wrap=True)


@app.command("train", epilog="Example: kimi-w4a8 draft train FOLDER --recipe agent --to DRAFT")
@expanded
def train(
    *,
    folder: Path = FOLDER,
    to: Path = typer.Option(..., "--to", help="New folder for the draft. A stopped run continues."),
    of: Of,
    epochs: int = typer.Option(3, "--epochs", min=1, help="Passes over the conversations."),
    batch: int = typer.Option(12, "--batch", min=1, help="Conversations of an optimizer step."),
    lr: float = typer.Option(2e-3, "--lr", min=1e-7, max=1, help="Highest learning rate."),
    keep: float = typer.Option(1.0, "--keep", min=0, help="Weight of what the first draft guesses rightly."),
    most_lost: float = typer.Option(0.05, "--most-lost", min=0, help="Accept length that each kind may lose."),
    device: str = typer.Option("cpu", "--device", help="Device of torch: cpu, cuda, cuda:1, ..."),
) -> None:
    """Train the recipe's draft on collected conversations.

    EAGLE3's training-time test is used over three draft steps. The newest tenth of each kind is held out for `compare`.
    The tenth before it decides how far the draft goes from the first one, so that no kind loses more than --most-lost.
    No key has more of the training's tokens than its part of the folder (--most-of-key). Writes the draft, and a recipe
    that serves it.
    """
    # start-up: torch
    from ..draft.checkpoint import save_draft
    from ..draft.training import TrainingSettings
    from ..draft.training import train as run

    launch = of.launch()
    target, first = _folders(launch)
    if to.exists():
        raise KimiError("the folder exists", str(to), "a new folder", "name another with --to")
    chosen, choosing, held_out = collected.divided(replace(of, most=10**9).conversations(folder))
    limited = collected.limited(chosen, read_consent(folder).most_of_key, of.most)
    rows = [one for one in limited if sum(one.guessed) > 3]  # a reply of one token teaches nothing
    settings = TrainingSettings(seed=1, epochs=epochs, batch=batch, lr=lr, keep=keep)
    settings = replace(settings, warmup=1 + min(settings.steps(len(rows)) // 10, settings.warmup))
    if settings.steps(len(rows)) < 1:
        raise KimiError(f"{len(rows)} conversations to train on", str(folder), f"at least {batch}", "collect more")
    draft, judge = _loaded(first, target, folder, device)
    to.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = to.with_name(f".{to.name}.checkpoint")
    with request_progress("training steps", settings.steps(len(rows)), table_console(), every=5.0) as show:

        def report(step: int, values: dict[str, float]) -> None:
            show(step, f"loss {values['loss']:.3f}")

        run(draft, rows, judge.states, judge.embedding, settings, report, checkpoint)
    part, before, after = judge.kept(_loaded(first, target, folder, device)[0], draft, choosing, most_lost)
    for kind, length in before.items():
        typer.echo(f"{kind}: accept length {length:.2f}, now {after[kind]:.2f}")
    record: dict[str, object] = {"first": str(first), "target": fingerprint(target), "part": part, "lengths": after}
    record |= {"settings": asdict(settings), "conversations": len(rows), "tokens": sum(len(r.tokens) for r in rows)}
    cutoffs = {kind: min(one.at for one in some) for kind, some in collected.by_kind(held_out).items()}
    extends = str(Path(of.recipe).resolve()) if of.recipe.endswith(".toml") else of.recipe.partition(":")[0]
    save_draft(draft, first, to, {**record, "held_out_from": cutoffs}, target, extends)
    checkpoint.unlink(missing_ok=True)
    said = f"draft: {to}, {part:.0%} of the way to the trained one"
    typer.echo(f"{said}; next: kimi-w4a8 draft compare {folder} --recipe {of.recipe} --new {to}")


@app.command("compare", epilog="Example: kimi-w4a8 draft compare FOLDER --recipe agent --new DRAFT")
@expanded
def compare(
    *,
    folder: Path = FOLDER,
    new: Path = typer.Option(..., "--new", help="Folder of the new draft."),
    of: Of,
    device: str = typer.Option("cpu", "--device", help="Device of torch: cpu, cuda, cuda:1, ..."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Folder of the page; default: a run directory."),
    runs: Path = RUNS,
) -> None:
    """Compare the recipe's draft with a new one.

    They meet conversations that the new one was not trained on.
    """
    page.require_place(output or runs)
    from ..report import draft_comparison  # optional: matplotlib
    from ..report.tables import conclude

    launch = of.launch()
    target, old = _folders(launch)
    held_out = _held_out(of.conversations(folder), new)
    before, judge = _loaded(old, target, folder, device)
    after, _ = _loaded(new, target, folder, device)
    kinds = judge.compare(before, after, held_out)
    about = f"Old draft: {old}. New draft: {new}. Greedy walk over replies of the target, 3 draft steps, topk 1."
    conclude(draft_comparison.page(kinds, about), output or new_run_dir("draft-compare", runs))
    raise typer.Exit(overall(kinds).exit_code)


@app.command("switch", epilog="Example: kimi-w4a8 draft switch LINK --to DRAFT")
def switch(
    link: Path = typer.Argument(..., metavar="LINK", help="Link that the recipe's draft.repo names."),
    new: Path | None = typer.Option(None, "--to", help="Folder of the new draft."),
    back: bool = typer.Option(False, "--back", help="Return to the draft before the last switch."),
) -> None:
    """Exchange the draft behind a link.

    Each server follows after `kill -HUP` of its `kimi-w4a8 serve`.
    """
    if (new is None) != back:
        raise UsageError("one of --to and --back is needed", expected="--to DRAFT, or --back")
    if new is None:
        typer.echo(f"{link}: back to {links.back(link)}")
    else:
        old = links.switch(link, new)
        typer.echo(f"{link}: {new}" + (f", before {old}" if old else ""))
    typer.echo("next: kill -HUP of each `kimi-w4a8 serve`, one after the other; behind smg no request is lost")


def _require_collection(folder: Path) -> None:
    """Raise UsageError for a folder in which nothing was ever switched on, for example a mistyped one."""
    if not (folder / CONSENT).is_file():
        expected = f"the folder that KIMI_COLLECT of an engine names, with its {CONSENT}"
        raise UsageError("no collection is in this folder", str(folder), expected)


def _folders(launch: Launch) -> tuple[Path, Path]:
    """Return the folders of target and draft on this disk."""
    found = local_folder(launch, launch.model, "revision")
    draft = local_folder(launch, launch.draft, "speculative-draft-model-revision")
    if found is None or draft is None:
        missing = launch.model if found is None else launch.draft
        raise KimiError("the checkpoint is not on this disk", str(missing), remedy=f"kimi-w4a8 fetch {launch.name}")
    return found, draft


def _loaded(draft: Path, target: Path, folder: Path, device: str) -> tuple[Draft, Judge]:
    """Return a draft, and what measures it on the states in `folder`."""
    # start-up: torch
    from ..draft.checkpoint import load_draft, target_tensor
    from ..draft.compare import Judge
    from ..draft.states import StoredStates, device_of

    found = load_draft(draft, target).to(at := device_of(device))
    stored = StoredStates(folder / collected.STATES, len(found.sizes.captured) * found.sizes.target_hidden)
    return found, Judge(stored, target_tensor(target).bfloat16().to(at))


def _held_out(conversations: list[Collected], new: Path) -> list[Collected]:
    """Return the conversations that the new draft was not trained on; those of other drafts all count."""
    record = new / "training.json"
    if not record.exists():
        return collected.divided(conversations)[2]
    since = json.loads(record.read_text())["held_out_from"]
    return [one for one in conversations if one.at >= since.get(one.kind, 0)]

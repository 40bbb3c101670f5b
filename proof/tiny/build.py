"""Make the built-in model: tokenizer, target, Quark, draft, evaluation. `make tiny` does so from nothing.

The target's training is saved every few minutes and continued after an interruption; the finished checkpoints replace
the package's only when every check passes.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.safetensors_header import read_checkpoint
from kimi_w4a8_lab.draft.eagle3 import Draft
from kimi_w4a8_lab.quantize.by_shard import quantize_by_shard
from kimi_w4a8_lab.quantize.quantize import quantize_w4a8
from kimi_w4a8_laptop import tiny
from kimi_w4a8_laptop.tiny import DRAFT, METRICS, TARGET, TARGET_BF16, WEIGHTS

from .checkpoint import load_draft, load_target, load_tower, save_draft, save_target
from .config import DraftConfig, MlaDraftConfig, TargetConfig
from .data import corpus
from .dialogues import FORMS
from .evaluate import TinyEvaluation, evaluate
from .generate import converse
from .model import TargetModel
from .problems import problems
from .tokenizer import load_tokenizer, train_tokenizer
from .tower import Tower, TowerTraining, train_tower
from .train_draft import DraftTraining, acceptance, conversations, train_draft
from .train_target import TargetTraining, train_target

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CORPUS_DOCUMENTS, CORPUS_SEED = 20_000, 0
EVALUATED_PROBLEMS = 500
MAX_LOSS_BY_MLA = 0.15  # of the accept length, against the MHA draft's
# The last of three parts for follow-ups, statements, and sums asked from their other side.
CONTINUED = TargetTraining(
    seed=20273, steps=300, lengths=(768, 1024), lr=2e-3, warmup=10, decay=0.9, int4_from=0.3, balance_rate=1e-3,
    drills=0.15, given=0.0, typed=0.22, brief=0.8,
)  # fmt: skip
CONTINUED_DRAFT = DraftTraining(seed=30362, dialogues=3000, epochs=1, lr=1e-2)
_TRAINING = ("target_training", "draft_training", "seconds")  # what metrics.json keeps of earlier runs
_LOG_EVERY = 50
_PACKAGES = ("torch", "amd-quark", "tokenizers", "safetensors")


def build(
    work: Path,
    progress: Progress,
    target_training: TargetTraining | None = None,
    draft_training: DraftTraining | None = None,
) -> TinyEvaluation:
    """Run all stages under `work`; on success replace the package's weights and metrics.json."""
    target_training, draft_training = target_training or TargetTraining(), draft_training or DraftTraining()
    tower_training = TowerTraining()
    seconds: dict[str, float] = {}
    tokenizer = train_tokenizer(corpus(CORPUS_DOCUMENTS, CORPUS_SEED), TargetConfig().vocab)
    with _stage(progress, "train the target", target_training.steps) as show:
        model, seconds["target"] = train_target(tokenizer, target_training, work / "target.pt", show)
    with _stage(progress, "train the tower", tower_training.steps) as show, _clock(seconds, "tower"):
        tower = train_tower(model.embed_tokens.weight.detach().bfloat16(), tokenizer, tower_training, show)
    record = {"target_training": asdict(target_training), "draft_training": asdict(draft_training)}
    return _finished(work, progress, _Parts(tokenizer, model, tower), draft_training, None, seconds, record)


def continue_build(work: Path, first: Path, progress: Progress) -> TinyEvaluation:
    """Train target and draft in `first` further under `work`, on the conversations as they are generated now.

    Tokenizer and tower stay. On success replace the package's weights and metrics.json, which keeps its earlier runs.
    """
    seconds: dict[str, float] = {}
    old, before = first / TARGET_BF16, json.loads(METRICS.read_text())
    tokenizer, begin = load_tokenizer(old), load_target(old)
    with _stage(progress, "train the target", CONTINUED.steps) as show:
        model, seconds["target"] = train_target(tokenizer, CONTINUED, work / "target.pt", show, begin)
    record: dict[str, Any] = {"earlier": {name: before[name] for name in ("earlier", *_TRAINING) if name in before}}
    record |= {"target_training": asdict(CONTINUED), "draft_training": asdict(CONTINUED_DRAFT)}
    draft, parts = load_draft(first / DRAFT, begin), _Parts(tokenizer, model, load_tower(old))
    return _finished(work, progress, parts, CONTINUED_DRAFT, draft, seconds, record)


@dataclass(frozen=True)
class _Parts:
    tokenizer: Tokenizer
    model: TargetModel
    tower: Tower


def _finished(
    work: Path,
    progress: Progress,
    parts: _Parts,
    draft_training: DraftTraining,
    first: Draft | None,
    seconds: dict[str, float],
    record: dict[str, Any],
) -> TinyEvaluation:
    """Quantize the target, train the draft from nothing or from `first`, evaluate both, and install what passes."""
    new = work / "weights"
    shutil.rmtree(new, ignore_errors=True)
    save_target(parts.model, parts.tower, parts.tokenizer, new / TARGET_BF16)
    with _clock(seconds, "quantize"):
        _quantize(new)

    served = load_target(new / TARGET)
    with (
        _clock(seconds, "draft"),
        _stage(progress, "train the draft", draft_training.steps(draft_training.dialogues)) as show,
    ):
        rows = conversations(parts.tokenizer, draft_training)
        draft = train_draft(served, rows, draft_training, show, DraftConfig(), first)
    save_draft(draft, TargetConfig(), DraftConfig(), new / DRAFT)

    with _clock(seconds, "evaluate"), _counter(progress, "held-out problems", 8 * EVALUATED_PROBLEMS) as advance:
        result = evaluate(new / TARGET, new / TARGET_BF16, new / DRAFT, EVALUATED_PROBLEMS, advance)
    record = {
        "evaluation": result.to_json(),
        **record,
        "seconds": {stage: round(value) for stage, value in seconds.items()},
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }
    (work / METRICS.name).write_text(json.dumps(record, indent=2) + "\n")
    if result.ok:
        _install(new)
        shutil.copyfile(work / METRICS.name, METRICS)
    return result


def renew_tower(work: Path, progress: Progress) -> None:
    """Train a tower for the package's target as it is, and write both checkpoints anew with it, under `work` first."""
    settings, old, new = TowerTraining(), tiny.target_bf16_path(), work / "weights"
    shutil.rmtree(new, ignore_errors=True)
    target, tokenizer = load_target(old), load_tokenizer(old)
    with _stage(progress, "train the tower", settings.steps) as show:
        tower = train_tower(target.embed_tokens.weight.detach(), tokenizer, settings, show)
    save_target(target, tower, tokenizer, new / TARGET_BF16)
    _quantize(new)
    shutil.copytree(tiny.draft_path(), new / DRAFT)
    _install(new)


def train_mla_draft(
    folder: Path, progress: Progress, training: DraftTraining, n: int, first: Path | None
) -> dict[str, tuple[str, str, bool]]:
    """Train an MLA draft for the package's target as it is, from nothing or from the one in `first`, into `folder`.

    Returns its checks over `n` held-out problems in every form: name -> (value, bar, passed). The package's draft of
    the same target sets the bar.
    """
    target, tokenizer = load_target(tiny.target_path()), load_tokenizer(tiny.target_path())
    begin = load_draft(first, target) if first else None
    with _stage(progress, "train the MLA draft", training.steps(training.dialogues)) as show:
        draft = train_draft(target, conversations(tokenizer, training), training, show, MlaDraftConfig(), begin)
    save_draft(draft, target.config, MlaDraftConfig(), folder)
    found = {}
    with _counter(progress, "held-out problems", len(FORMS) * n) as advance:
        for name, form in FORMS.items():
            rng = random.Random(name)
            asked = [form(problem, rng) for problem in problems("held_out", n)]
            exchanges = [
                e for dialogue in converse(target, tokenizer, asked, advance=advance) for e in dialogue.exchanges
            ]
            mha, mla = (
                acceptance(target, load_draft(d, target), exchanges)[0].value for d in (tiny.draft_path(), folder)
            )
            least = mha - MAX_LOSS_BY_MLA
            found[f"{name}: accept length"] = f"{mla:.2f}", f">= {least:.2f}", mla >= least
    return found


def _quantize(new: Path) -> None:
    """Quantize as `kimi-w4a8 quantize` does, so that a user gets the same files, the index included."""
    quantize_by_shard(read_checkpoint(new / TARGET_BF16), new / TARGET, quantize_w4a8, {}, lambda size: None)


def _install(new: Path) -> None:
    """Put the finished checkpoints where the package looks for them."""
    if not WEIGHTS.parent.is_dir():
        raise KimiError("the package's folder is not writable", str(WEIGHTS.parent))
    fresh = WEIGHTS.with_name("weights.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(new, fresh)
    shutil.rmtree(WEIGHTS, ignore_errors=True)
    fresh.rename(WEIGHTS)


@contextmanager
def _clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


@contextmanager
def _stage(progress: Progress, title: str, total: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A progress bar for a training loop that reports (step, values)."""
    task = progress.add_task(title, total=total)

    def show(step: int, values: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        progress.update(task, completed=step, description=f"{title}: {shown}")
        if not progress.console.is_terminal and (step % _LOG_EVERY == 0 or step == total):
            progress.console.print(f"{title}: step {step}/{total}  {shown}")  # a log file has no moving bar

    yield show


@contextmanager
def _counter(progress: Progress, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar for a loop that reports how many more are done."""
    task = progress.add_task(title, total=total)

    def advance(n: int) -> None:
        progress.advance(task, n)

    yield advance

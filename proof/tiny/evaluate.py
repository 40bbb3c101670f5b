"""The checks that the built-in model has to pass, computed from checkpoints on disk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .checkpoint import load_draft, load_target
from .dialogues import FORMS, Dialogue
from .generate import converse
from .model import TargetModel
from .problems import problems
from .tokenizer import load_tokenizer
from .train_draft import acceptance
from .typed import Typed, examination

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_RIGHT = {"instant": 0.97, "think": 0.97, "tools": 0.95, "json": 0.95}
MIN_RIGHT_TYPED = 0.92  # 95 % before follow-ups and statements were learned; docs/tiny.md
MAX_LOSS_BY_QUANTIZATION = 0.01
MIN_ACCEPT_LENGTH = 2.8
MAX_WEIGHT_BYTES = 8_000_000


@dataclass(frozen=True)
class Form:
    """Results of one form of conversation."""

    right_bf16: float
    right_w4a8: float
    accept_length: float
    accepted_by_position: list[float]
    reply_tokens: float


@dataclass(frozen=True)
class TinyEvaluation:
    """Results on held-out problems, each asked in every form; sizes in bytes of all safetensors files.

    typed: shares of the typed texts answered rightly in W4A8, by form and kind (sum, story, other).
    """

    held_out_problems: int
    forms: dict[str, Form]
    weight_bytes: int
    typed: dict[str, dict[str, float]]

    def checks(self) -> dict[str, tuple[str, str, bool]]:
        """Name -> (value, bar, passed)."""
        found = {}
        for name, form in self.forms.items():
            bar, worst = MIN_RIGHT[name], min(form.right_bf16, form.right_w4a8)
            found[f"{name}: right, W4A8 (BF16)"] = (
                f"{form.right_w4a8:.1%} ({form.right_bf16:.1%})",
                f">= {bar:.0%}, at most {MAX_LOSS_BY_QUANTIZATION:.0%} less than BF16",
                worst >= bar and round(form.right_bf16 - form.right_w4a8, 6) <= MAX_LOSS_BY_QUANTIZATION,
            )
            found[f"{name}: accept length"] = (
                f"{form.accept_length:.2f}", f">= {MIN_ACCEPT_LENGTH}", form.accept_length >= MIN_ACCEPT_LENGTH,
            )  # fmt: skip
        for name, kinds in self.typed.items():
            for kind, share in {"asked": asked_share(kinds), "other": kinds["other"]}.items():
                title = f"typed, {name}: {'sums and stories' if kind == 'asked' else 'everything else'}"
                found[title] = f"{share:.1%}", f">= {MIN_RIGHT_TYPED:.0%}", share >= MIN_RIGHT_TYPED
        found["weights"] = (
            f"{self.weight_bytes / 1e6:.2f} MB", f"<= {MAX_WEIGHT_BYTES / 1e6:.0f} MB",
            self.weight_bytes <= MAX_WEIGHT_BYTES,
        )  # fmt: skip
        return found

    @property
    def ok(self) -> bool:
        """True if every check passes."""
        return all(passed for _, _, passed in self.checks().values())

    def to_json(self) -> dict[str, Any]:
        """The fields, for metrics.json."""
        return asdict(self)

    def table(self) -> Table:
        """The checks as a table."""
        table = Table(title=f"built-in model on {self.held_out_problems} held-out problems, greedy, 3 steps, topk 1")
        for column in ("check", "value", "bar", ""):
            table.add_column(column)
        for name, (value, bar, passed) in self.checks().items():
            table.add_row(name, value, bar, "[green]pass[/]" if passed else "[red]FAIL[/]")
        return table


def evaluate(
    target: Path,
    target_bf16: Path,
    draft: Path,
    n: int,
    advance: Callable[[int], None] = lambda done: None,
    texts: Sequence[Typed] | None = None,
) -> TinyEvaluation:
    """Ask `n` held-out problems in every form of both targets, and walk the draft over the W4A8 replies.

    The W4A8 target is also asked the typed `texts`, by default the whole examination.
    `advance` is told of finished conversations, 8 * n in all.
    """
    tokenizer = load_tokenizer(target)
    bf16, w4a8 = load_target(target_bf16), load_target(target)
    speculating = load_draft(draft, w4a8)
    asked = []
    for name, form in FORMS.items():
        rng = random.Random(name)
        asked += [form(problem, rng) for problem in problems("held_out", n)]
    # All forms at once: a step of a few conversations takes as long as one of many.
    every_plain, every_served = (converse(model, tokenizer, asked, advance=advance) for model in (bf16, w4a8))
    forms = {}
    for number, name in enumerate(FORMS):
        plain, served = (replies[number * n : (number + 1) * n] for replies in (every_plain, every_served))
        exchanges = [exchange for dialogue in served for exchange in dialogue.exchanges]
        accepted, by_position = acceptance(w4a8, speculating, exchanges)
        forms[name] = Form(
            right_bf16=sum(dialogue.right for dialogue in plain) / n,
            right_w4a8=sum(dialogue.right for dialogue in served) / n,
            accept_length=round(accepted.value, 4),
            accepted_by_position=[round(share.value, 4) for share in by_position],
            reply_tokens=sum(len(e.tokens) - e.prompt for e in exchanges) / len(exchanges),
        )
    typed = {name: shares(examined(w4a8, tokenizer, name == "think", texts)) for name in ("think", "instant")}
    return TinyEvaluation(n, forms, weight_bytes([target, target_bf16, draft]), typed)


def examined(
    model: TargetModel, tokenizer: Tokenizer, thinking: bool, texts: Sequence[Typed] | None = None
) -> list[tuple[Typed, str]]:
    """Return every text, of the examination by default, with the model's reply."""
    texts = texts or examination()
    turns: dict[str, list[dict[str, str]]] = {"": []}  # before a text, by the first question
    if firsts := sorted({typed.first for typed in texts} - {""}):
        answers = _replies(model, tokenizer, [[{"role": "user", "content": first}] for first in firsts], thinking)
        for first, answer in zip(firsts, answers, strict=True):
            turns[first] = [{"role": "user", "content": first}, {"role": "assistant", "content": answer}]
    asked = [[*turns[typed.first], {"role": "user", "content": typed.text}] for typed in texts]
    return list(zip(texts, _replies(model, tokenizer, asked, thinking), strict=True))


def _replies(model: TargetModel, tokenizer: Tokenizer, asked: list[list[dict[str, str]]], thinking: bool) -> list[str]:
    rows = [
        Dialogue([*turns, {"role": "assistant"}], None, thinking=thinking, earlier=len(turns) - 1) for turns in asked
    ]
    return [reply.answer or "" for reply in converse(model, tokenizer, rows)]


def shares(replies: list[tuple[Typed, str]]) -> dict[str, float]:
    """Return the share of right replies by kind."""
    right: dict[str, list[bool]] = {}
    for typed, reply in replies:
        right.setdefault(typed.kind, []).append(typed.accepts(reply))
    return {kind: round(sum(marks) / len(marks), 4) for kind, marks in right.items()}


def asked_share(kinds: dict[str, float]) -> float:
    """Return the share of right answers to sums and stories together."""
    counts = Counter(case.kind for case in examination())
    asked = [kind for kind in kinds if kind != "other"]
    return sum(kinds[kind] * counts[kind] for kind in asked) / sum(counts[kind] for kind in asked)


def weight_bytes(folders: list[Path]) -> int:
    """Size of all safetensors files."""
    return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))

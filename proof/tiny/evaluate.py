"""The checks that the built-in model has to pass, computed from checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kimi_w4a8_eagle3.tiny.problems import problems

from .acceptance import acceptance
from .checkpoint import load_draft, load_target
from .generate import answer_all, exact_match
from .tokenizer import load_tokenizer
from .train_draft import Dialogue

MIN_EXACT_MATCH = 0.85
MAX_LOSS_BY_QUANTIZATION = 0.03
MIN_ACCEPT_LENGTH = 2.5
MAX_WEIGHT_BYTES = 8_000_000


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out problems; sizes in bytes of all safetensors files."""

    held_out_problems: int
    exact_match_bf16: float
    exact_match_w4a8: float
    accept_length: float
    accepted_by_position: list[float]
    reply_tokens: float
    weight_bytes: int

    def checks(self) -> dict[str, tuple[str, str, bool]]:
        """Name -> (value, bar, passed)."""
        loss = self.exact_match_bf16 - self.exact_match_w4a8
        return {
            "exact match, BF16": (
                f"{self.exact_match_bf16:.1%}", f">= {MIN_EXACT_MATCH:.0%}", self.exact_match_bf16 >= MIN_EXACT_MATCH,
            ),
            "exact match, W4A8": (
                f"{self.exact_match_w4a8:.1%}", f"at most {MAX_LOSS_BY_QUANTIZATION:.0%} less than BF16",
                loss <= MAX_LOSS_BY_QUANTIZATION,
            ),
            "accept length (3 steps, topk 1, 4 draft tokens)": (
                f"{self.accept_length:.2f}", f">= {MIN_ACCEPT_LENGTH}", self.accept_length >= MIN_ACCEPT_LENGTH,
            ),
            "weights": (
                f"{self.weight_bytes / 1e6:.2f} MB", f"<= {MAX_WEIGHT_BYTES / 1e6:.0f} MB",
                self.weight_bytes <= MAX_WEIGHT_BYTES,
            ),
        }  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether every check passes."""
        return all(passed for _, _, passed in self.checks().values())

    def to_json(self) -> dict[str, Any]:
        """The fields, for metrics.json."""
        return asdict(self)

    def table(self) -> Table:
        """The checks as a table."""
        table = Table(title=f"built-in model on {self.held_out_problems} held-out problems, greedy")
        for column in ("check", "value", "bar", ""):
            table.add_column(column)
        for name, (value, bar, passed) in self.checks().items():
            table.add_row(name, value, bar, "[green]pass[/]" if passed else "[red]FAIL[/]")
        return table


def evaluate(
    target: Path, target_bf16: Path, draft: Path, n: int, advance: Callable[[int], None] = lambda done: None
) -> Evaluation:
    """Answer `n` held-out problems with both targets and walk the draft over the W4A8 replies.

    `advance` is told of finished problems, 2 * n in all.
    """
    asked = problems("held_out", n)
    tokenizer = load_tokenizer(target)
    bf16 = answer_all(load_target(target_bf16), tokenizer, asked, advance=advance)
    model = load_target(target)
    w4a8 = answer_all(model, tokenizer, asked, advance=advance)
    dialogues = [Dialogue(prompt + reply, len(prompt)) for prompt, reply in w4a8]
    accepted = acceptance(model, load_draft(draft), dialogues)
    return Evaluation(
        held_out_problems=n,
        exact_match_bf16=exact_match(tokenizer, asked, [reply for _, reply in bf16]),
        exact_match_w4a8=exact_match(tokenizer, asked, [reply for _, reply in w4a8]),
        accept_length=round(accepted.length, 4),
        accepted_by_position=[round(share, 4) for share in accepted.by_position],
        reply_tokens=sum(len(reply) for _, reply in w4a8) / n,
        weight_bytes=weight_bytes([target, target_bf16, draft]),
    )


def weight_bytes(folders: list[Path]) -> int:
    """Size of all safetensors files."""
    return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))

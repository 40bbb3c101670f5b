"""Accuracy tasks: lm-eval's task files in `eval/tasks`, the protocol of a run, and the problems of the user's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError

from ..base.data_file import lines
from ..base.first_error import first_error
from .recorder import CHAT, COMPLETIONS

METRICS = ("flexible-extract", "strict-match")
MARKER = "####"
Problems = dict[str, list[dict[str, str]]]  # by split; each with `question` and `answer`


class _Problem(BaseModel):
    question: str = Field(pattern=r"\S")
    answer: str = Field(pattern=rf"{MARKER}\s*\S[^#]*$")


@dataclass(frozen=True)
class Task:
    """One lm-eval task. name: of `eval/tasks/<name>.yaml`. shots: examples per question. counts: problems by split."""

    name: str
    title: str
    shots: int
    chat: bool
    max_tokens: int
    counts: dict[str, int]

    def __str__(self) -> str:
        return self.title


GSM8K = Task("kimi_gsm8k", "GSM8K", 10, False, 512, {"train": 7473, "test": 1319})
TINY_MATH = Task("tiny_math", "tiny-math", 0, True, 192, {})


@dataclass(frozen=True)
class Protocol:
    """Settings that decide a run's figures. Runs that are compared must share them, except for the concurrency."""

    task: Task
    chat: bool
    shots: int
    max_tokens: int
    limit: int | None = None
    concurrency: int = 256
    seed: int = 1234

    @property
    def endpoint(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    @property
    def count(self) -> int | None:
        return self.limit or self.task.counts.get("test")


def read_problems(folder: Path, task: Task = GSM8K) -> Problems:
    """Read a folder's `train.jsonl` and `test.jsonl`.

    Raises KimiError for a missing file, a line that is not a problem, an answer without `#### N`, or a wrong count.
    """
    found: Problems = {}
    for split, count in task.counts.items():
        path = folder / f"{split}.jsonl"
        expected = "train.jsonl and test.jsonl as openai/gsm8k publishes them"
        remedy = "name the folder with --data-dir, or omit it to use the Hugging Face Hub"
        rows = lines(path, f"the data of {task.title}", expected, remedy)
        found[split] = [_problem(path, number, line) for number, line in enumerate(rows, start=1)]
        if len(rows) != count:
            raise KimiError(
                f"{len(rows)} problems instead of {count}",
                where=str(path),
                expected=f"the complete {split} split, because a part gives figures that cannot be compared",
                remedy="download it again; to ask fewer problems, use --limit",
            )
    return found


def _problem(path: Path, number: int, line: str) -> dict[str, str]:
    try:
        return _Problem.model_validate_json(line).model_dump()
    except ValidationError as error:
        expected = '{"question": "...", "answer": "... #### N"}'
        raise KimiError(f"line {number} is not a problem: {first_error(error)}", str(path), expected) from None

"""lm-eval's task files (`eval/tasks`) and the data that a run gives them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import KimiError
from ..base.files import lines
from ..base.resources import operator_dir
from .problems import problems

METRICS = ("flexible-extract", "strict-match")
MARKER = "####"


@dataclass(frozen=True)
class Task:
    """One lm-eval task. name: of `eval/tasks/<name>.yaml`. shots: examples per question. counts: problems by split."""

    name: str
    title: str
    shots: int
    chat: bool
    max_tokens: int
    counts: dict[str, int]


GSM8K = Task("kimi_gsm8k", "GSM8K", 10, False, 512, {"train": 7473, "test": 1319})
TINY_MATH = Task("tiny_math", "tiny-math", 0, True, 192, {})


def check_data(folder: Path, task: Task = GSM8K) -> dict[str, Path]:
    """Read every line of a folder's data files and return the files by split.

    Raises KimiError for a missing file, a line that is not a problem, an answer without `#### N`, or a wrong count.
    """
    files = {split: folder / f"{split}.jsonl" for split in task.counts}
    for split, path in files.items():
        try:
            problems = lines(path)
        except (OSError, UnicodeDecodeError) as error:
            raise KimiError(
                f"cannot read the data of {task.title}: {getattr(error, 'strerror', None) or error}",
                where=str(path),
                expected="train.jsonl and test.jsonl as openai/gsm8k publishes them",
                remedy="name the folder with --data-dir, or omit it to use the Hugging Face Hub",
            ) from error
        for number, line in enumerate(problems, start=1):
            _check_line(path, number, line)
        if len(problems) != task.counts[split]:
            raise KimiError(
                f"{len(problems)} problems instead of {task.counts[split]}",
                where=str(path),
                expected=f"the complete {split} split, because a part gives figures that cannot be compared",
                remedy="download it again; to ask fewer problems, use --limit",
            )
    return files


def _check_line(path: Path, number: int, line: str) -> None:
    try:
        problem = json.loads(line)
        question, answer = problem["question"], problem["answer"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise KimiError(
            f"line {number} is not a problem: {what}", where=str(path), expected='{"question": ..., "answer": ...}'
        ) from None
    marked = isinstance(answer, str) and answer.rpartition(MARKER)[1] and answer.rpartition(MARKER)[2].strip()
    if not (isinstance(question, str) and question.strip() and marked):
        raise KimiError(
            f"line {number} has no question or no answer", where=str(path), expected="an answer that ends with `#### N`"
        )


def write_task(task: Task, folder: Path, files: dict[str, Path] | None) -> None:
    """Write the task file of one run: the shipped one, with its data from `files` if given."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = operator_dir("eval") / "tasks" / f"{task.name}.yaml"
    lines = [f"include: {json.dumps(str(shipped.resolve()))}", f"task: {task.name}"]
    if files is not None:
        located = {split: str(path.resolve()) for split, path in files.items()}
        lines += ["dataset_path: json", "dataset_name: null", f"dataset_kwargs: {json.dumps({'data_files': located})}"]
    (folder / f"{task.name}.yaml").write_text("\n".join(lines) + "\n")


def write_tiny_problems(path: Path, count: int) -> None:
    """Write the built-in model's first `count` held-out problems as `question`/`answer` lines."""
    lines = [json.dumps({"question": p.question, "answer": p.solution}) for p in problems(count)]
    path.write_text("\n".join(lines) + "\n")

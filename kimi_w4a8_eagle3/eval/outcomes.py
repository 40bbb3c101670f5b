"""ProblemOutcome of every problem: lm-eval's scored samples joined with the recorder's requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..base.errors import KimiError
from ..base.files import lines, write_atomic
from .recorder import prompt_sha256, read_answers
from .tasks import MARKER, METRICS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PROBLEMS = "problems.jsonl"
Row = TypeVar("Row")
Status = Literal["answered", "truncated", "failed"]


@dataclass(frozen=True)
class ProblemOutcome:
    """One problem. extracted, correct: by metric. A failed request has no answer and counts in no accuracy."""

    id: int
    question: str
    target: str
    status: Status
    text: str
    extracted: dict[str, str]
    correct: dict[str, bool]
    completion_tokens: int | None
    attempts: int
    seconds: float
    error: str | None = None

    @property
    def has_marker(self) -> bool:
        """True if the answer states its result after `####`, as the examples do."""
        return MARKER in self.text


def read_outcomes(lm_eval_output: Path, requests: Path, chat: bool) -> list[ProblemOutcome]:
    """Join the newest samples file under `lm_eval_output` with the recorded requests, in the order of the problems."""
    answers = {answer.prompt_sha256: answer for answer in read_answers(requests).values()}
    by_problem: dict[int, dict[str, dict[str, Any]]] = {}
    for sample in _samples(lm_eval_output):
        by_problem.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    outcomes = []
    for number, samples in sorted(by_problem.items()):
        sample = samples[METRICS[0]]
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        answer = answers.get(prompt_sha256(_messages(prompt) if chat else prompt))
        if answer is None:
            raise KimiError(
                f"no request is recorded for problem {number}", where=str(requests), remedy="start a new run"
            )
        status: Status = "answered"
        if answer.error is not None:
            status = "failed"
        elif answer.finish_reason == "length":
            status = "truncated"
        outcomes.append(
            ProblemOutcome(
                id=number,
                question=sample["doc"]["question"],
                target=sample["doc"]["answer"].rpartition(MARKER)[2].strip(),
                status=status,
                text=answer.text,
                extracted={name: str(samples[name]["filtered_resps"][0]) for name in METRICS},
                correct={name: samples[name]["exact_match"] == 1.0 for name in METRICS},
                completion_tokens=answer.completion_tokens,
                attempts=answer.attempts,
                seconds=answer.seconds,
                error=answer.error,
            )
        )
    return outcomes


def load_outcomes(run: Path) -> list[ProblemOutcome]:
    """Load the per-problem record of a finished run; raise KimiError for any other folder."""
    return load_rows(run / PROBLEMS, ProblemOutcome, "`kimi-w4a8 eval gsm8k` or `kimi-w4a8 eval tiny-math`")


def write_rows(path: Path, rows: Sequence[DataclassInstance]) -> None:
    """Write one JSON object per line."""
    write_atomic(path, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def load_rows(path: Path, kind: type[Row], made_by: str) -> list[Row]:
    """Read what `write_rows` wrote; raise KimiError for another file."""
    try:
        return [kind(**json.loads(line)) for line in lines(path)]
    except (OSError, ValueError, TypeError) as error:
        raise KimiError(
            f"not a finished run: {error}",
            where=str(path),
            expected=f"a finished run of {made_by}",
            remedy="finish it with --resume, or name another run",
        ) from error


def newest(folder: Path, pattern: str) -> Path:
    """Return the newest match; lm-eval puts a time into its file names, and a resumed run may leave several files."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise KimiError("lm-eval wrote no result", where=f"{folder}/{pattern}", remedy="read lm_eval.log beside it")
    return found[-1]


def _samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(newest(folder, "*/samples_*.jsonl"))]


def _messages(prompt: Any) -> Any:
    """Decode a logged chat prompt: a list of messages, its JSON, or a one-element list around the JSON."""
    while isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    return json.loads(prompt) if isinstance(prompt, str) else prompt

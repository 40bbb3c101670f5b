"""Problems asked and scored by lm-eval, with the recorder as its model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import operator_dir

from .recorder import Answer, Recorder, ShowAnswers
from .results import ProblemOutcome, Status
from .tasks import MARKER, METRICS, Problems, Protocol

_END_OF_THINKING = "</think>"


class _RecordedModel(LM):
    """Model of lm-eval whose answers come from the recorder. answers, texts (cut at a stop): by problem."""

    tokenizer_name = ""

    def __init__(self, protocol: Protocol, model: str, recorder: Recorder, show: ShowAnswers) -> None:
        super().__init__()
        self.protocol, self.model, self.recorder, self.show = protocol, model, recorder, show
        self.answers: dict[int, Answer] = {}
        self.texts: dict[int, str] = {}

    def generate_until(self, requests: list[Instance]) -> list[str]:
        bodies = [request_body(self.protocol, self.model, *request.args) for request in requests]
        answers = self.recorder.ask(self.protocol.endpoint, bodies, self.protocol.concurrency, self.show)
        self.answers = {request.doc_id: answer for request, answer in zip(requests, answers, strict=True)}
        stops = [request.args[1]["until"] if self.protocol.chat else [] for request in requests]
        texts = [cut(answer.text, until) for answer, until in zip(answers, stops, strict=True)]
        self.texts = dict(zip(self.answers, texts, strict=True))
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps(chat_history)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def request_body(protocol: Protocol, model: str, prompt: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the body that lm-eval's `local-completions` or `local-chat-completions` would send.

    A chat request has no stops: a server would apply them to the thinking, too, which may quote "Question:". `cut`
    applies them to the answer.
    """
    asked = {"messages": json.loads(prompt)} if protocol.chat else {"prompt": prompt, "stop": settings["until"]}
    limits = {"max_tokens": protocol.max_tokens, "temperature": settings["temperature"], "seed": protocol.seed}
    return {"model": model, **asked, **limits}


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the answer after the thinking, up to the first stop."""
    answer = text.rpartition(_END_OF_THINKING)[2] if stops else text
    return min((answer.partition(stop)[0] for stop in stops), key=len, default=answer)


def load_task(protocol: Protocol, data: Problems | None) -> dict[str, Any]:
    """Return lm-eval's task; data: problems instead of those on the Hub."""
    file = operator_dir("eval") / "tasks" / f"{protocol.task.name}.yaml"
    settings = {**yaml.safe_load(file.read_text()), "num_fewshot": protocol.shots}
    if data is not None:
        settings["custom_dataset"] = as_dataset(data)
    found: dict[str, Any] = TaskManager(include_defaults=False).load([settings])
    found["tasks"][protocol.task.name].set_fewshot_seed(protocol.seed)
    return found


def as_dataset(data: Problems) -> Callable[..., DatasetDict]:
    """Return problems in the form of lm-eval's `custom_dataset`."""
    rows = DatasetDict({split: Dataset.from_list(problems) for split, problems in data.items()})
    return lambda **_: rows


def score(
    protocol: Protocol, model: str, recorder: Recorder, data: Problems | None, log: Path, show: ShowAnswers
) -> tuple[list[ProblemOutcome], dict[str, Any]]:
    """Ask and score the problems; return their outcomes, and lm-eval's own figures.

    lm-eval's messages go to `log`.
    """
    asked = _RecordedModel(protocol, model, recorder, show)
    with log.open("a", encoding="utf-8") as stream, redirect_stderr(stream):
        try:
            found = evaluate(
                asked, load_task(protocol, data), protocol.limit, bootstrap_iters=0, apply_chat_template=protocol.chat
            )
        except KimiError:
            raise
        except Exception as error:  # lm-eval and the libraries that load its data raise exceptions of many kinds
            raise KimiError(
                f"lm-eval failed: {type(error).__name__}: {error}",
                where=str(log),
                remedy="" if data else "without access to the Hugging Face Hub, name the data with --data-dir",
            ) from error
    by_problem: dict[int, dict[str, dict[str, Any]]] = {}
    for sample in found["samples"][protocol.task.name]:
        by_problem.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    outcomes = [
        _outcome(asked.answers[number], asked.texts[number], samples) for number, samples in sorted(by_problem.items())
    ]
    return outcomes, found["results"][protocol.task.name]


def _outcome(answer: Answer, text: str, samples: dict[str, dict[str, Any]]) -> ProblemOutcome:
    problem = samples[METRICS[0]]
    cut: Status = "truncated" if answer.finish_reason == "length" else "answered"
    return ProblemOutcome(
        id=problem["doc_id"],
        question=problem["doc"]["question"],
        target=problem["doc"]["answer"].rpartition(MARKER)[2].strip(),
        status="failed" if answer.error is not None else cut,
        text=text,
        extracted={name: str(samples[name]["filtered_resps"][0]) for name in METRICS},
        correct={name: bool(samples[name]["exact_match"] == 1.0) for name in METRICS},
        completion_tokens=answer.completion_tokens,
        attempts=answer.attempts,
        seconds=answer.seconds,
        error=answer.error,
        why_empty="" if text.strip() or answer.error else _why_empty(answer),
    )


def _why_empty(answer: Answer) -> str:
    """Return the cause of an answer without text, and the remedy."""
    if answer.text.strip():
        return "it begins with a stop of the task"
    message = answer.response["choices"][0].get("message")
    if message is None:
        return "no text came; if the model needs its chat template, add --chat"
    thought = "only thinking came" if message.get("reasoning_content") else "the server sent no text"
    return f"{thought}; raise --max-tokens" if answer.finish_reason == "length" else f"{thought}; read requests.jsonl"

"""`kimi-w4a8 eval smoke`: one-minute check before a rollout: failures, plausible answers, accepted drafts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kimi_w4a8_eagle3.base.finding import Finding, checked
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms

from ..base.server_under_test import Target
from ..base.verdict import Verdict
from .evaluation import RunOptions, evaluated
from .problems import MathProblem, parse_answer
from .problems import problems as sample
from .recorder import CHAT, Answer, Patience
from .results import Conclusion, SmokeResult

_NUMBER = re.compile(r"-?\d[\d,]*")
_LOOP = re.compile(r"(.{4,60}?)\1{7,}", re.DOTALL)  # one piece of text eight times in a row
_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Floors:
    """Limits that a healthy server meets. max_tokens: enough for a model that reasons before it answers."""

    problems: int = 30
    max_tokens: int = 512
    concurrency: int = 8
    correct: float = 0.6
    accept_length: float = 2.0
    speculates: bool = True


def run(
    target: Target, floors: Floors, console: Console, runs: Path = DEFAULT_ROOT
) -> tuple[Path, Verdict, list[Finding]]:
    """Ask easy problems and return the run directory, pass or fail, and the checks."""
    problems = sample(floors.problems, seed=21)
    once = RunOptions(runs=runs, patience=Patience(attempts=1, server_away_s=0.0))
    with evaluated(target, SmokeResult.kind, once, console) as evaluation:
        settings = {"model": evaluation.server.model, "max_tokens": floors.max_tokens, "temperature": 0.0}
        settings |= {"return_spec_tokens_details": True}
        bodies = [{**settings, "messages": [{"role": "user", "content": p.question}]} for p in problems]
        answers = evaluation.ask("problems", CHAT, bodies, floors.concurrency, console)
        verdict, checks = Conclusion(), list(check(problems, answers, floors))
        verdict.judge(checks)
        if not verdict.reasons:
            verdict.conclude(Verdict.PASS, "every check holds")
        pairs = list(zip(problems, answers, strict=True))
        shown = [{"question": p.question, "answer": p.answer, "reply": a.text} for p, a in pairs]
        facts = {"checks": checks, "solved": sum(map(_solved, problems, answers)), "wanted": floors.correct}
        return evaluation.finish(SmokeResult, verdict, **facts, problems=shown), verdict.state, checks


def check(problems: Sequence[MathProblem], answers: Sequence[Answer], floors: Floors) -> Iterator[Finding]:
    """Yield the checks of a set of answers."""
    replies = [answer for answer in answers if answer.error is None]
    failures = [answer.error for answer in answers if answer.error is not None]
    n = len(answers)
    odd = [a for a in replies if not a.text.strip() or _LOOP.search(a.text) or "\ufffd" in a.text]
    cut = sum(a.finish_reason == "length" for a in replies)
    solved = sum(map(_solved, problems, answers))
    first = f": {failures[0]}" if failures else ""
    yield checked("requests answered", f"{len(replies)} of {n}{first}", "all", not failures)
    yield checked("empty, garbled or looping answers", str(len(odd)), "none", not odd)
    yield checked("answers cut at the limit", str(cut), f"at most {n // 10}", cut <= n // 10)
    yield checked("problems solved", f"{solved} of {n}", f">= {floors.correct:.0%}", solved >= floors.correct * n)
    acceptance = acceptance_from_histograms((_histogram(a.response) for a in replies), _DRAFT_TOKENS)
    if floors.speculates:
        found = "no speculation" if acceptance is None else f"{acceptance.length:.2f}"
        good = acceptance is not None and acceptance.length >= floors.accept_length
        yield checked("accept length", found, f">= {floors.accept_length:.2f}", good)
    else:
        yield checked("speculation", "off" if acceptance is None else "on", "off", acceptance is None)


def _histogram(response: dict[str, Any]) -> list[int]:
    """Return the verify steps by accepted draft tokens; empty without speculation."""
    details = (response.get("sglext") or {}).get("spec_tokens_details") or {}
    return details.get("spec_correct_drafts_histogram") or []


def _solved(problem: MathProblem, answer: Answer) -> bool:
    return answer.error is None and stated_number(answer.text) == problem.answer


def stated_number(text: str) -> int | None:
    """Return the number behind the last `####`, else the last number of the text."""
    marked = parse_answer(text)
    if marked is not None:
        return marked
    found = _NUMBER.findall(text)
    return int(found[-1].replace(",", "")) if found else None

"""`kimi-w4a8 eval smoke`: one-minute check before a rollout: failures, plausible answers, accepted drafts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ..base.errors import KimiError
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from ..base.verdict import Verdict
from ..engine.client import EngineClient, Generation
from ..engine.metrics import Acceptance, acceptance_from_counters, acceptance_from_histograms, scrape
from ..fleet.target import Target, record_of
from .problems import MathProblem, parse_answer
from .problems import problems as sample

KIND = "eval-smoke"
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


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    found: str
    wanted: str
    passed: bool


def run(
    target: Target, floors: Floors, console: Console, runs: Path = DEFAULT_ROOT
) -> tuple[Path, Verdict, list[Check]]:
    """Ask easy problems and return the run directory, pass or fail, and the checks."""
    target.check()
    folder = new_run_dir("eval-smoke", runs)
    problems = sample(floors.problems, seed=21)
    with (
        target.running(folder / "server.log", console.print) as server,
        EngineClient(server.base_url, server.api_key) as client,
    ):

        def ask(problem: MathProblem) -> Generation | KimiError:
            try:
                return client.chat(problem.question, floors.max_tokens)
            except KimiError as error:
                return error

        before = scrape(server.ops_url) if server.ops_url else None  # a router does not forward accept histograms
        with console.status(f"{server.name}: {len(problems)} problems"), ThreadPoolExecutor(floors.concurrency) as pool:
            answers = list(pool.map(ask, problems))
        added = scrape(server.ops_url).since(before) if server.ops_url and before else None
    counted = acceptance_from_counters(added, _DRAFT_TOKENS) if added else None
    checks = check(problems, answers, floors, counted)
    state = Verdict.PASS if all(check.passed for check in checks) else Verdict.FAIL
    write_json(folder / RECORD, record_of(KIND, {"server": target}, model=server.model))
    shown = [
        {"question": p.question, "answer": p.answer, "reply": asdict(a) if isinstance(a, Generation) else str(a)}
        for p, a in zip(problems, answers, strict=True)
    ]
    result = {"kind": KIND, "configuration": server.name, "state": state, "floors": asdict(floors)}
    write_json(folder / "result.json", {**result, "checks": [asdict(check) for check in checks], "problems": shown})
    return folder, state, checks


def check(
    problems: Sequence[MathProblem],
    answers: Sequence[Generation | KimiError],
    floors: Floors,
    counted: Acceptance | None = None,
) -> list[Check]:
    """Check a set of answers; a failed request is a KimiError.

    counted: acceptance from the server's counters, for answers without a histogram.
    """
    replies = [a for a in answers if isinstance(a, Generation)]
    failures = [a for a in answers if isinstance(a, KimiError)]
    n = len(answers)
    odd = [a for a in replies if not a.text.strip() or _LOOP.search(a.text) or "\ufffd" in a.text]
    cut = sum(a.finish_reason == "length" for a in replies)
    solved = sum(
        isinstance(a, Generation) and stated_number(a.text) == p.answer for p, a in zip(problems, answers, strict=True)
    )
    first = f": {failures[0].what}" if failures else ""
    return [
        Check("requests answered", f"{len(replies)} of {n}{first}", "all", not failures),
        Check("empty, garbled or looping answers", str(len(odd)), "none", not odd),
        Check("answers cut at the limit", str(cut), f"at most {n // 10}", cut <= n // 10),
        Check("problems solved", f"{solved} of {n}", f">= {floors.correct:.0%}", solved >= floors.correct * n),
        *_acceptance_checks(
            counted or acceptance_from_histograms((a.accepted_histogram for a in replies), _DRAFT_TOKENS), floors
        ),
    ]


def stated_number(text: str) -> int | None:
    """Return the number behind the last `####`, else the last number of the text."""
    marked = parse_answer(text)
    if marked is not None:
        return marked
    found = _NUMBER.findall(text)
    return int(found[-1].replace(",", "")) if found else None


def _acceptance_checks(acceptance: Acceptance | None, floors: Floors) -> list[Check]:
    if not floors.speculates:
        return [Check("speculation", "off" if acceptance is None else "on", "off", acceptance is None)]
    found = "no speculation" if acceptance is None else f"{acceptance.length:.2f}"
    good = acceptance is not None and acceptance.length >= floors.accept_length
    return [Check("accept length", found, f">= {floors.accept_length:.2f}", good)]

"""`eval lossless`: compare a server with speculation against the same model without it.

Greedy, seeded, penalized and sampled answers are compared, all as token ids. docs/eval.md explains the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT
from kimi_w4a8_eagle3.engine.metrics import accept_length

from ..base.request_progress import request_progress
from ..base.run_folder import RunFolder
from ..base.server_under_test import Server, Target
from ..base.verdict import Verdict
from .comparison import (
    SAMPLED,
    Match,
    Samples,
    SamplingMatch,
    against_prefill,
    greedy_differences,
    matched,
    sampled_match,
)
from .prompts import Prompt, prompts
from .results import LosslessReport, LosslessResult
from .tokens import Prefill, TokenClient, Tokens

CONCURRENCIES = (1, 8, 40)  # from the second on, prompts come from the prefix cache where there is one
GREEDY = "greedy"
DRAWN_LEVELS = (8, 40)
# Sampling parameters of each kind of answer, beside the plan's; a request's number is its seed.
KINDS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0, "sampling_seed": None},
    "seeded": {},
    "penalized": {
        "temperature": 0.0,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_new_tokens": 16,
    },
}
_DRAWN_TOKENS = 32  # rounding changes more of longer answers
_PREFIX_TOKENS = 3
_SAMPLES_PER_REQUEST, _SAMPLED_TOKENS = 25, 8192
_MAX_LISTED = 5
_STOPPED = 12  # answers repeated with a stop string; rounding may change one of them, a fault changes most


@dataclass(frozen=True)
class LosslessPlan:
    """Size of the comparison. samples: continuations per prefix and server, 0 for none."""

    prompts: int = 48
    max_tokens: int = 128
    samples: int = 400
    prefixes: int = 4
    temperature: float = 1.0
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: Path = DEFAULT_ROOT


@dataclass
class Answers:
    """Answers of one server. given: by kind and concurrency, one for each prompt. sampled: one list per prefix.

    prefills: the reference's, keyed by the ids of prompt and answer, for both servers' greedy answers. late: for some
    answers with a stop string, whether they continued behind it.
    """

    server: Server
    prompt_ids: list[tuple[int, ...]]
    given: dict[str, dict[int, list[Tokens]]] = field(default_factory=dict)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    sampled: list[Samples] = field(default_factory=list)
    prefills: dict[tuple[int, ...], Prefill] = field(default_factory=dict)
    late: list[bool] = field(default_factory=list)

    @property
    def texts(self) -> list[tuple[tuple[int, ...], Tokens]]:
        """Greedy answers, each with the ids of its prompt."""
        return [pair for answers in self.given[GREEDY].values() for pair in zip(self.prompt_ids, answers, strict=True)]

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step over all greedy answers; None without speculation."""
        answers = [answer for _, answer in self.texts]
        steps = sum(answer.verify_steps for answer in answers)
        return accept_length(sum(len(answer.ids) for answer in answers), len(answers), steps) if steps else None


def run(
    reference: Target, target: Target, plan: LosslessPlan, console: Console, release: Callable[[], None] | None = None
) -> tuple[Path, LosslessReport]:
    """Ask both servers, one after the other, and return the run directory and the comparison.

    The reference runs last and prefills the answers of both, so that eight GPUs are enough. release: called when the
    target is no longer needed, before the reference starts.
    """
    reference.check()
    target.check()
    sides, asked = {"reference": reference, "speculated": target}, prompts(plan.prompts)
    kept = RunFolder[LosslessResult].begin(LosslessResult.kind, plan.runs, sides, plan=asdict(plan))
    with target.running(kept.folder / "speculated.log", console.print) as server:
        found = _ask(server, asked, plan, None, console)
    if release is not None:
        release()
    with reference.running(kept.folder / "reference.log", console.print) as server:
        expected = _ask(server, asked, plan, found, console)
    report = compare(asked, expected, found, plan)
    texts = {
        side: {level: [answer.text for answer in batch] for level, batch in given[GREEDY].items()}
        for side, given in (("reference", expected.given), ("speculated", found.given))
    }
    result = LosslessResult(
        configuration=found.server.name, model=found.server.model, verdict=report, reference=expected.server.name,
        prompts=[asdict(prompt) for prompt in asked], texts=texts,
    )  # fmt: skip
    kept.save(result)
    return kept.folder, report


def compare(asked: list[Prompt], expected: Answers, found: Answers, plan: LosslessPlan) -> LosslessReport:
    """Return the verdict on two servers' answers to the same prompts."""
    sides = expected.given[GREEDY], found.given[GREEDY]
    report = LosslessReport(
        differences=[
            difference
            for level in plan.concurrencies
            for difference in greedy_differences(asked, sides[0][level], sides[1][level], found.server.name, level)
        ],
        matches=[matched(kind, expected.given[kind], found.given[kind]) for kind in expected.given],
        accept_length=found.accept_length,
        prefill=against_prefill(expected.texts, found.texts, expected.prefills),
        sampling=sampled_match(expected.sampled, found.sampled, plan.temperature) if plan.samples else None,
    )
    greedy, *drawn = report.matches
    if expected.prompt_ids != found.prompt_ids:
        what = "the servers tokenize the prompts differently, so they do not serve the same model"
        report.conclude(Verdict.INVALID, what)
    elif found.accept_length is None:
        report.conclude(Verdict.INVALID, f"{found.server.name} does not speculate, so nothing was tested")
    else:
        _judge_greedy(report, found, plan)
    if report.differences:
        report.reasons += map(str, [one for one in report.differences if one.gap is not None][:_MAX_LISTED])
        own = f"{greedy.own} of {greedy.prompts} of the reference's own answers depend on the concurrency"
        report.reasons.append(f"for comparison: {own}")
    judged: list[Match | SamplingMatch] = [*([report.sampling] if report.sampling else []), *drawn]
    for match in judged:
        report.conclude(Verdict.FAIL if match.differs else Verdict.MEASURED, str(match))
    return report


def _judge_greedy(report: LosslessReport, found: Answers, plan: LosslessPlan) -> None:
    """Fail if greedy answers are not the model's own."""
    greedy, late = report.matches[0], sum(found.late)
    bugs = [difference for difference in report.differences if difference.gap is None]
    problems = list(report.prefill.problems)
    if 2 * late > len(found.late):
        problems.append(f"{late} of {len(found.late)} answers continue past their stop string")
    if bugs:
        problems.append(f"{len(bugs)} greedy answers have a token that is not among the reference's candidates")
    if problems:
        report.conclude(Verdict.FAIL, *problems, *map(str, bugs[:_MAX_LISTED]))
        return
    same = f"{greedy.answers - greedy.differing} of {greedy.answers} greedy answers have the same tokens"
    levels = f"concurrency {', '.join(map(str, plan.concurrencies))}"
    own = f"every token is the argmax of the logits that verified it; accept length {report.accept_length:.2f}"
    report.conclude(Verdict.PASS, f"{same} ({levels}); {own}", *map(str, report.prefill.measures))


def _ask(server: Server, asked: list[Prompt], plan: LosslessPlan, earlier: Answers | None, console: Console) -> Answers:
    """Ask one server. The second server also prefills all greedy answers and continues the prefixes of `earlier`."""
    with TokenClient(*server.engine) as probe:
        ids = probe.all(lambda prompt: probe.chat_ids(prompt.text, server.model), asked, 8)
        answers = Answers(server, ids)
        for kind in KINDS:
            levels = plan.concurrencies if kind == GREEDY else DRAWN_LEVELS
            answers.given[kind] = {level: _answers(probe, kind, ids, level, plan, console) for level in levels}
        first = list(zip(ids, answers.given[GREEDY][plan.concurrencies[0]], strict=True))
        if earlier is None:
            answers.late = [_late(probe, *pair) for pair in first[:_STOPPED]]
            answers.prefixes = _uncertain(first, plan.prefixes)
        else:
            answers.prefixes = earlier.prefixes
            texts = dict.fromkeys((prompt, answer.ids) for prompt, answer in answers.texts + earlier.texts)
            with request_progress(f"{server.name}: prefills of all answers", len(texts), console) as show:
                prefills = probe.all(lambda pair: probe.prefill(*pair), list(texts), 1, show)
            answers.prefills = {prompt + answer: found for (prompt, answer), found in zip(texts, prefills, strict=True)}
        if plan.samples:
            title = f"{server.name}: prefixes with {plan.samples} samples each"
            with request_progress(title, len(answers.prefixes), console) as show:
                answers.sampled = probe.all(partial(_sample, probe, plan), answers.prefixes, 1, show)
    console.print(f"[green]✓[/] {server.name}: {len(asked)} prompts, {', '.join(KINDS)} and sampled")
    return answers


def _answers(
    probe: TokenClient, kind: str, ids: list[tuple[int, ...]], level: int, plan: LosslessPlan, console: Console
) -> list[Tokens]:
    """Return the answers of one kind at one concurrency."""
    shared = {"temperature": plan.temperature, "max_new_tokens": _DRAWN_TOKENS}
    if kind == GREEDY:
        shared["max_new_tokens"] = plan.max_tokens

    def answer(number: int) -> Tokens:
        params = {**shared, "sampling_seed": number, **KINDS[kind]}
        return probe.answer(ids[number], params, with_top=kind == GREEDY)

    with request_progress(f"{kind} answers at concurrency {level}", len(ids), console) as show:
        return probe.all(answer, range(len(ids)), level, show)


def _uncertain(answered: list[tuple[tuple[int, ...], Tokens]], count: int) -> list[tuple[int, ...]]:
    """Return the prompts, with their first tokens, after which the model is least certain and samples vary most."""

    def certainty(number: int) -> float:
        places = answered[number][1].top[_PREFIX_TOKENS : _PREFIX_TOKENS + 4]
        return sum(place[0][0] for place in places) / len(places) if places else 0.0

    chosen = sorted(range(len(answered)), key=certainty)[:count]
    return [(*prompt, *answer.ids[:_PREFIX_TOKENS]) for prompt, answer in map(answered.__getitem__, sorted(chosen))]


def _late(probe: TokenClient, ids: tuple[int, ...], answer: Tokens) -> bool:
    """Return True if an answer with a stop string is too long: it contains the string without its last token."""
    stop = answer.text[len(answer.text) // 2 :][:3]
    tokens = len(probe.greedy(ids, len(answer.ids), with_top=False, stop=stop).ids) if stop else 0
    return tokens > 1 and stop in probe.greedy(ids, tokens - 1, with_top=False).text


def _sample(probe: TokenClient, plan: LosslessPlan, prefix: tuple[int, ...]) -> Samples:
    most = max(1, min(_SAMPLES_PER_REQUEST, _SAMPLED_TOKENS // len(prefix)))
    sizes = [min(most, plan.samples - i) for i in range(0, plan.samples, most)]
    params = {"max_new_tokens": SAMPLED, "temperature": plan.temperature}
    return [drawn for batch in probe.all(lambda n: probe.samples(prefix, params, n), sizes, 2) for drawn in batch]

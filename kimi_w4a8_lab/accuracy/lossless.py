"""`kimi-w4a8 eval lossless`: compare answers with and without EAGLE3; the server without it is the reference.

The two servers need not run at the same time (on eight GPUs they cannot). The reference runs last and prefills the
answers of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from kimi_w4a8_eagle3.engine.metrics import accept_length

from ..base.experiment import write_result
from ..base.request_progress import request_progress
from ..base.server_under_test import Server, Target, record_of
from ..base.verdict import Verdict
from . import drawn_match, prefill_match, sampling_match
from .greedy_match import Divergence, divergences
from .prefill_match import PrefillMatch
from .prompts import Prompt, prompts
from .results import Agreement, LosslessReport, LosslessResult
from .sampling_match import Samples
from .tokens import Prefill, TokenClient, Tokens

CONCURRENCIES = (1, 8, 40)  # from the second on, prompts come from the prefix cache where there is one
_PREFIX_TOKENS = 3
_SAMPLES_PER_REQUEST, _SAMPLED_TOKENS = 25, 8192  # the door counts a prompt once for each of its samples
_MAX_LISTED = 5
_STOPPED = 12  # answers repeated with a stop string; rounding may change one of them, a fault changes most


@dataclass(frozen=True)
class LosslessPlan:
    """Size of the comparison. samples: continuations per prefix and server, 0 for greedy answers only."""

    prompts: int = 48
    max_tokens: int = 128
    samples: int = 400
    prefixes: int = 4
    temperature: float = 1.0
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: Path = DEFAULT_ROOT


@dataclass
class Answers:
    """Answers of one server. greedy: per concurrency, one for each prompt. sampled: one list per prefix.

    prefills: the reference's, keyed by the ids of prompt and answer, for both servers' greedy answers. late: for some
    answers with a stop string, whether they continued behind it. drawn: seeded and penalized ones, by kind and
    concurrency.
    """

    server: Server
    prompt_ids: list[tuple[int, ...]]
    greedy: dict[int, list[Tokens]] = field(default_factory=dict)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    sampled: list[Samples] = field(default_factory=list)
    prefills: dict[tuple[int, ...], Prefill] = field(default_factory=dict)
    late: list[bool] = field(default_factory=list)
    drawn: dict[str, dict[int, list[Tokens]]] = field(default_factory=dict)

    @property
    def texts(self) -> list[tuple[tuple[int, ...], Tokens]]:
        return [pair for answers in self.greedy.values() for pair in zip(self.prompt_ids, answers, strict=True)]

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step over all greedy answers; None without speculation."""
        answers = [answer for batch in self.greedy.values() for answer in batch]
        steps = sum(answer.verify_steps for answer in answers)
        return accept_length(sum(len(answer.ids) for answer in answers), len(answers), steps) if steps else None


def run(
    reference: Target, target: Target, plan: LosslessPlan, console: Console, release: Callable[[], None] | None = None
) -> tuple[Path, LosslessReport]:
    """Ask both servers, one after the other, and return the run directory and the comparison.

    release: called when the target is no longer needed, before the reference starts.
    """
    reference.check()
    target.check()
    folder = new_run_dir(LosslessResult.kind, plan.runs)
    asked = prompts(plan.prompts)
    with target.running(folder / "speculated.log", console.print) as server:
        found = _ask(server, asked, plan, None, console)
    if release is not None:
        release()
    with reference.running(folder / "reference.log", console.print) as server:
        expected = _ask(server, asked, plan, found, console)
    report = compare(asked, expected, found, plan)
    sides = {"reference": reference, "speculated": target}
    write_json(folder / RECORD, record_of(LosslessResult.kind, sides, model=found.server.model, plan=asdict(plan)))
    answers = {"reference": expected, "speculated": found}
    texts = {
        side: {level: [answer.text for answer in batch] for level, batch in given.greedy.items()}
        for side, given in answers.items()
    }
    result = LosslessResult(
        configuration=found.server.name, model=found.server.model, verdict=report, reference=expected.server.name,
        prompts=[asdict(prompt) for prompt in asked], texts=texts,
    )  # fmt: skip
    write_result(folder, result)
    return folder, report


def compare(asked: list[Prompt], expected: Answers, found: Answers, plan: LosslessPlan) -> LosslessReport:
    """Return the verdict on two servers' answers to the same prompts."""
    first = expected.greedy[plan.concurrencies[0]]
    own, parted, same = list[Divergence](), list[Divergence](), list[Agreement]()
    for concurrency in plan.concurrencies:
        alone = divergences(asked, first, expected.greedy[concurrency], concurrency)
        differing = divergences(asked, expected.greedy[concurrency], found.greedy[concurrency], concurrency)
        own, parted = own + alone, parted + differing
        for side, different in ((found.server.name, differing), (f"{expected.server.name} again", alone)):
            same.append(Agreement(concurrency, side, len(asked) - len(different), len(asked)))
    prefill = prefill_match.compare(expected.texts, found.texts, expected.prefills)
    report = LosslessReport(
        divergences=parted,
        same=same,
        self_differences=len({divergence.prompt for divergence in own}),
        self_gap=max((divergence.gap for divergence in own if divergence.gap is not None), default=0.0),
        accept_length=found.accept_length,
        prefill=prefill,
        sampling=sampling_match.compare(expected.sampled, found.sampled, plan.temperature) if plan.samples else None,
        drawn=[drawn_match.compare(kind, expected.drawn[kind], found.drawn[kind]) for kind in expected.drawn],
    )
    if expected.prompt_ids != found.prompt_ids:
        what = "the servers tokenize the prompts differently, so they do not serve the same model"
        report.conclude(Verdict.INVALID, what)
    elif found.accept_length is None:
        report.conclude(Verdict.INVALID, f"{found.server.name} does not speculate, so nothing was tested")
    else:
        _judge_greedy(report, prefill, found, plan)
    if report.divergences:
        candidates = [divergence for divergence in report.divergences if divergence.judgement != "bug"]
        report.reasons += map(str, candidates[:_MAX_LISTED])
        report.reasons.append(
            f"for comparison: {report.self_differences} of {len(asked)} of the reference's own answers depend on "
            f"the concurrency, with gaps up to {report.self_gap:.2f}"
        )
    if report.sampling is not None:
        report.conclude(Verdict.FAIL if report.sampling.differs else Verdict.MEASURED, str(report.sampling))
    for match in report.drawn:
        report.conclude(Verdict.FAIL if match.differs else Verdict.MEASURED, str(match))
    return report


def _ask(server: Server, asked: list[Prompt], plan: LosslessPlan, earlier: Answers | None, console: Console) -> Answers:
    """Ask one server. The second server also prefills all greedy answers and continues the prefixes of `earlier`."""
    if server.ops_url is not None:
        raise KimiError(
            "a router has no endpoint that gives token ids of a prompt",
            where=server.base_url,
            expected="the addresses of two engines",
            remedy=f"the engines behind this router are listed in {server.ops_url}/status",
        )
    with TokenClient(server.base_url, server.api_key) as probe:
        ids = probe.all(lambda prompt: probe.chat_ids(prompt.text, server.model), asked, 8)
        answers = Answers(server, ids)
        for concurrency in plan.concurrencies:
            title = f"{server.name}: greedy answers at concurrency {concurrency}"
            with request_progress(title, len(asked), console) as show:
                answers.greedy[concurrency] = probe.all(
                    lambda prompt: probe.greedy(prompt, plan.max_tokens, with_top=True), ids, concurrency, show
                )
        if earlier is None:
            answers.late = [
                _late(probe, *pair)
                for pair in list(zip(ids, answers.greedy[plan.concurrencies[0]], strict=True))[:_STOPPED]
            ]
        else:
            texts = dict.fromkeys((p, a.ids) for p, a in answers.texts + earlier.texts)
            with request_progress(f"{server.name}: prefills of all answers", len(texts), console) as show:
                for number, (prompt, answer) in enumerate(texts, 1):
                    answers.prefills[prompt + answer] = probe.prefill(prompt, answer)
                    show(number, "")
        for kind in drawn_match.KINDS:
            answers.drawn[kind] = _drawn(probe, kind, ids, plan, console)
        answers.prefixes = _prefixes(answers, plan) if earlier is None else earlier.prefixes
        if plan.samples:
            title = f"{server.name}: prefixes with {plan.samples} samples each"
            with request_progress(title, len(answers.prefixes), console) as show:
                for number, prefix in enumerate(answers.prefixes, 1):
                    answers.sampled.append(_sample(probe, prefix, plan))
                    show(number, "")
    console.print(
        f"[green]✓[/] {server.name}: {len(asked)} prompts at concurrency {_levels(plan)}, seeded, penalized, sampled"
    )
    return answers


def _drawn(
    probe: TokenClient, kind: str, ids: list[tuple[int, ...]], plan: LosslessPlan, console: Console
) -> dict[int, list[Tokens]]:
    """Return the answers of one kind at each concurrency."""

    def answer(number: int) -> Tokens:
        return probe.answer(ids[number], drawn_match.params_of(kind, number, plan.temperature), with_top=False)

    found = {}
    for concurrency in drawn_match.LEVELS:
        with request_progress(f"{kind} answers at concurrency {concurrency}", len(ids), console) as show:
            found[concurrency] = probe.all(answer, range(len(ids)), concurrency, show)
    return found


def _prefixes(answers: Answers, plan: LosslessPlan) -> list[tuple[int, ...]]:
    """Return the prompts, with their first tokens, after which the model is least certain and samples vary most."""

    def certainty(number: int) -> float:
        places = answers.greedy[plan.concurrencies[0]][number].top[_PREFIX_TOKENS : _PREFIX_TOKENS + 4]
        return sum(place[0][0] for place in places) / len(places) if places else 0.0

    numbers = sorted(range(len(answers.prompt_ids)), key=certainty)[: plan.prefixes]
    first = answers.greedy[plan.concurrencies[0]]
    return [(*answers.prompt_ids[n], *first[n].ids[:_PREFIX_TOKENS]) for n in sorted(numbers)]


def _late(probe: TokenClient, ids: tuple[int, ...], answer: Tokens) -> bool:
    """True if an answer with a stop string is too long: without its last token it already contains the string."""
    stop = answer.text[len(answer.text) // 2 :][:3]
    tokens = len(probe.greedy(ids, len(answer.ids), with_top=False, stop=stop).ids) if stop else 0
    return tokens > 1 and stop in probe.greedy(ids, tokens - 1, with_top=False).text


def _sample(probe: TokenClient, prefix: tuple[int, ...], plan: LosslessPlan) -> Samples:
    most = max(1, min(_SAMPLES_PER_REQUEST, _SAMPLED_TOKENS // len(prefix)))
    sizes = [min(most, plan.samples - i) for i in range(0, plan.samples, most)]
    params = {"max_new_tokens": sampling_match.LENGTH, "temperature": plan.temperature}
    return [drawn for batch in probe.all(lambda n: probe.samples(prefix, params, n), sizes, 2) for drawn in batch]


def _judge_greedy(report: LosslessReport, prefill: PrefillMatch, found: Answers, plan: LosslessPlan) -> None:
    """Fail if greedy answers are not the model's own."""
    problems, late = prefill.problems, sum(found.late)
    bugs = [divergence for divergence in report.divergences if divergence.judgement == "bug"]
    if 2 * late > len(found.late):
        problems.append(f"{late} of {len(found.late)} answers continue past their stop string")
    if bugs:
        problems.append(f"{len(bugs)} greedy answers have a token that is not among the reference's candidates")
    if problems:
        report.conclude(Verdict.FAIL, *problems, *map(str, bugs[:_MAX_LISTED]))
        return
    total = len(found.texts)
    same = f"{total - len(report.divergences)} of {total} greedy answers have the same tokens"
    own = f"every token is the argmax of the logits that verified it; accept length {found.accept_length:.2f}"
    report.conclude(Verdict.PASS, f"{same} (concurrency {_levels(plan)}); {own}", *map(str, prefill.measures))


def _levels(plan: LosslessPlan) -> str:
    return ", ".join(map(str, plan.concurrencies))

"""`kimi-w4a8 eval lossless`: does EAGLE3 change speed and nothing else? The unspeculated server is the reference.

The two servers need not run at the same time (on eight GPUs they cannot): the reference keeps the logprobs of its best
candidates at every position, so that a later difference can be judged without asking it again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.errors import KimiError
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from ..base.verdict import Verdict
from . import sampling_match
from .choice import Choice, Target, reached, record_of
from .greedy_match import Divergence, divergences
from .prompts import Prompt, prompts
from .sampling_match import Samples, SamplingMatch
from .section import write_page
from .tokens import Probe, Tokens

KIND = "eval-lossless"
CONCURRENCIES = (1, 40)
_PREFIX_TOKENS = 3
_SAMPLES_PER_REQUEST = 25
_MAX_LISTED = 5
_LEAST_GAP = 1e-6


@dataclass(frozen=True)
class Plan:
    """How much is compared. tie_gap: nats below which two tokens count as equally good for the reference.

    The default is two steps of a bfloat16 logit between 16 and 32; a reference that parts from itself at larger gaps
    between the concurrencies raises it to that noise. samples: continuations per prefix and server, 0 for
    greedy only.
    """

    prompts: int = 48
    max_tokens: int = 128
    tie_gap: float = 0.25
    samples: int = 400
    prefixes: int = 4
    temperature: float = 1.0
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: Path = DEFAULT_ROOT


@dataclass
class Answers:
    """What one server said. greedy: by concurrency, one per prompt. sampled: one list per prefix."""

    target: Target
    prompt_ids: list[tuple[int, ...]]
    greedy: dict[int, list[Tokens]] = field(default_factory=dict)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    sampled: list[Samples] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step over all greedy answers; None without speculation."""
        answers = [answer for each in self.greedy.values() for answer in each]
        steps = sum(answer.verify_steps for answer in answers)
        return sum(len(answer.ids) - 1 for answer in answers) / steps if steps else None


@dataclass
class Report:
    """The comparison of two servers and what it means."""

    state: Verdict
    reasons: list[str]
    divergences: list[Divergence]
    self_differences: int
    self_gap: float
    tie_gap: float
    prompts: int
    accept_length: float | None
    sampling: SamplingMatch | None


def run(reference: Choice, target: Choice, plan: Plan, console: Console) -> tuple[Path, Report]:
    """Ask both servers, one after the other, and compare; returns the run directory and the report."""
    reference.check()
    target.check()
    folder = new_run_dir("eval-lossless", plan.runs)
    asked = prompts(plan.prompts)
    with reached(reference, folder, console, "reference") as server:
        expected = _ask(server, asked, plan, None, console)
    with reached(target, folder, console, "speculated") as server:
        found = _ask(server, asked, plan, expected, console)
    report = compare(asked, expected, found, plan)
    write_json(folder / RECORD, record_of(KIND, expected.target, found.target, plan=asdict(plan)))
    write_json(folder / "result.json", _result(asked, expected, found, report, plan))
    write_page(folder)
    return folder, report


def compare(asked: list[Prompt], expected: Answers, found: Answers, plan: Plan) -> Report:
    """The verdict on two servers' answers to the same prompts."""
    first = expected.greedy[plan.concurrencies[0]]
    own = [
        each
        for concurrency in plan.concurrencies[1:]
        for each in divergences(asked, first, expected.greedy[concurrency], concurrency, plan.tie_gap)
    ]
    noise = max((each.gap for each in own if each.gap is not None), default=0.0)
    tie_gap = max(plan.tie_gap, noise + _LEAST_GAP)
    parted = [
        each
        for concurrency in plan.concurrencies
        for each in divergences(asked, expected.greedy[concurrency], found.greedy[concurrency], concurrency, tie_gap)
    ]
    report = Report(
        state=Verdict.PASS,
        reasons=[],
        divergences=parted,
        self_differences=len({each.prompt for each in own}),
        self_gap=noise,
        tie_gap=tie_gap,
        prompts=len(asked),
        accept_length=found.accept_length,
        sampling=sampling_match.compare(expected.sampled, found.sampled, plan.temperature) if plan.samples else None,
    )
    _judge_greedy(report, expected, found, plan)
    if report.sampling is not None:
        _judge_sampling(report, report.sampling)
    return report


def _ask(server: Target, asked: list[Prompt], plan: Plan, earlier: Answers | None, console: Console) -> Answers:
    """One server's answers; the prefixes for sampling come from the reference (`earlier`): both continue the same."""
    is_reference = earlier is None
    if server.ops_url is not None:
        raise KimiError(
            "a router has no endpoint that gives token ids of a prompt",
            where=server.base_url,
            expected="the addresses of two engines",
            remedy=f"those behind this router are in {server.ops_url}/status",
        )
    with Probe(server.base_url, server.api_key) as probe:
        ids = probe.all(lambda prompt: probe.chat_ids(prompt.text, server.model), asked, 8)
        answers = Answers(server, ids, info=probe.server_info())
        for concurrency in plan.concurrencies:
            with console.status(f"{server.name}: {len(asked)} greedy answers at concurrency {concurrency}"):
                answers.greedy[concurrency] = probe.all(
                    lambda prompt: probe.greedy(prompt, plan.max_tokens, with_top=is_reference), ids, concurrency
                )
        answers.prefixes = _prefixes(answers, plan) if earlier is None else earlier.prefixes
        if plan.samples:
            with console.status(f"{server.name}: {plan.samples} samples after each of {plan.prefixes} prefixes"):
                answers.sampled = [_sample(probe, prefix, plan) for prefix in answers.prefixes]
    console.print(f"[green]✓[/] {server.name}: {len(asked)} prompts at concurrency {_both(plan)}, sampled")
    return answers


def _prefixes(answers: Answers, plan: Plan) -> list[tuple[int, ...]]:
    """The prompts after whose first tokens the reference is least certain: there is a distribution to compare."""

    def certainty(number: int) -> float:
        places = answers.greedy[plan.concurrencies[0]][number].top[_PREFIX_TOKENS : _PREFIX_TOKENS + 4]
        return sum(place[0][0] for place in places) / len(places) if places else 0.0

    numbers = sorted(range(len(answers.prompt_ids)), key=certainty)[: plan.prefixes]
    first = answers.greedy[plan.concurrencies[0]]
    return [(*answers.prompt_ids[n], *first[n].ids[:_PREFIX_TOKENS]) for n in sorted(numbers)]


def _sample(probe: Probe, prefix: tuple[int, ...], plan: Plan) -> Samples:
    sizes = [min(_SAMPLES_PER_REQUEST, plan.samples - i) for i in range(0, plan.samples, _SAMPLES_PER_REQUEST)]
    params = {"max_new_tokens": sampling_match.LENGTH, "temperature": plan.temperature}
    batches = probe.all(lambda n: probe.samples(prefix, params, n), sizes, 2)
    return [each for batch in batches for each in batch]


def _judge_greedy(report: Report, expected: Answers, found: Answers, plan: Plan) -> None:
    bugs = [each for each in report.divergences if each.judgement == "bug"]
    ties = len(report.divergences) - len(bugs)
    total = report.prompts * len(plan.concurrencies)
    if expected.prompt_ids != found.prompt_ids:
        report.state = Verdict.INVALID
        report.reasons.append("the two servers tokenize the prompts differently: they do not serve the same model")
    elif found.accept_length is None:
        report.state = Verdict.INVALID
        report.reasons.append(f"{found.target.name} does not speculate: nothing was tested")
    elif bugs:
        report.state = Verdict.FAIL
        report.reasons.append(f"{len(bugs)} of {total} greedy answers differ beyond a numerical tie")
        report.reasons += [str(each) for each in bugs[:_MAX_LISTED]]
    else:
        report.reasons.append(
            f"{total - ties} of {total} greedy answers have the same tokens (concurrency {_both(plan)}), "
            f"{ties} part at a numerical tie (gap below {report.tie_gap:.2f} nats); "
            f"accept length {found.accept_length:.2f}"
        )
    if report.divergences:
        report.reasons += [str(each) for each in report.divergences if each.judgement == "tie"][:_MAX_LISTED]
        report.reasons.append(
            f"for comparison: {report.self_differences} of {report.prompts} answers of the reference itself depend on "
            f"the concurrency, with gaps up to {report.self_gap:.2f}"
        )


def _judge_sampling(report: Report, match: SamplingMatch) -> None:
    smallest = min((test.adjusted_p for test in match.tests), default=1.0)
    head = f"sampling at temperature {match.temperature:g}, {match.samples} continuations a prefix: "
    if not match.conclusive:
        report.reasons.append(head + "nothing varied, so there was nothing to compare")
    elif not match.differs:
        report.reasons.append(head + f"the same distribution ({len(match.tests)} tests, smallest p {smallest:.2g})")
    else:
        what = "temperature is ignored after the first token" if match.ignores_temperature else "another distribution"
        report.reasons.append(head + f"{what} (smallest p {smallest:.2g})")
        if report.state == Verdict.PASS:
            report.state = Verdict.FAIL


def _both(plan: Plan) -> str:
    return " and ".join(map(str, plan.concurrencies))


def _result(asked: list[Prompt], expected: Answers, found: Answers, report: Report, plan: Plan) -> dict[str, Any]:
    def texts(answers: Answers) -> dict[str, list[str]]:
        return {str(concurrency): [t.text for t in each] for concurrency, each in answers.greedy.items()}

    return {
        "kind": KIND,
        "configuration": found.target.name,
        "reference": expected.target.name,
        "plan": asdict(plan),
        "report": asdict(report),
        "prompts": [asdict(prompt) for prompt in asked],
        "texts": {"reference": texts(expected), "speculated": texts(found)},
    }

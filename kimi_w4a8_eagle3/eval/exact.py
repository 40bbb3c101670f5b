"""`kimi-w4a8 eval lossless --exact`: the same bits whatever else a server does, with no rule for ties.

Every request has one answer: the tokens and the logprobs that the server without speculation and without prefix cache
gives when it answers one request after the other. Everything else must give the same: with EAGLE3, with the prefix
cache, with many requests at once in another order, some of which go away, some of which are retracted. Requests are
greedy, sampled with seeds, or penalized. This holds where a token's logits do not depend on its batch: on SGLang's CPU
engine with this package's operators.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import tiny
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from ..base.verdict import Verdict
from ..engine.client import Refused
from ..engine.metrics import read
from .choice import Choice, reached
from .greedy_match import first_difference
from .lossless import KIND
from .prompts import prompts
from .section import write_page
from .tokens import Probe, Tokens

RETRACTED = "sglang:num_retracted_requests_total"
REFUSED = "HTTP 400"  # in place of the reason for which an answer ended
CONCURRENCIES = (1, 8, 40)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_VERY_LONG_QUESTIONS = 180  # about 30 tokens each
_VERY_LONG = 4000
_LEAVERS, _LEFT = 3, 1000  # clients that go away in the middle of an answer, and the longest prompt they leave
# SGLang retracts a running request at every so many forward passes, as a full KV pool makes it do.
_SETTINGS = ("env.SGLANG_TEST_RETRACT=1", "env.SGLANG_TEST_RETRACT_INTERVAL=25")
_LISTED = 8
# What requests ask for in turn, by the word of --ask; the seed of a request is its number.
_SEEDED = {"temperature": 1.0}
_PENALIZED = {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2, "min_new_tokens": 12}
ASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "seeded": (
        _SEEDED,
        _SEEDED | {"top_p": 0.95},
        {"temperature": 0.6, "top_k": 20},
        {"temperature": 1.5, "min_p": 0.05},
    ),
    "penalized": (
        {"temperature": 0.0, **_PENALIZED},
        _SEEDED | _PENALIZED,
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "min_new_tokens": 14},
    ),
}
ASKS["mixed"] = tuple(
    params for kinds in zip(ASKS["greedy"] * 4, ASKS["seeded"], ASKS["penalized"], strict=True) for params in kinds
)


@dataclass(frozen=True)
class Plan:
    """How much is compared. prompts: different ones; a third of them is asked a second time with a stop string."""

    prompts: int = 72
    max_tokens: int = 64
    ask: str = "mixed"
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: Path = DEFAULT_ROOT


@dataclass(frozen=True)
class Request:
    """What one request asks for, in tokens of the served model."""

    kind: str
    ids: tuple[int, ...]
    params: dict[str, Any]


@dataclass(frozen=True)
class Side:
    """A server and what its answers are about to show, which is invalid when it did not happen."""

    choice: Choice
    label: str
    speculates: bool
    caches: bool = False
    retracts: bool = False


@dataclass(frozen=True)
class Difference:
    """An answer that is not the expected one. `what` differs first: at token `position`, or the end of the text."""

    side: str
    concurrency: int
    request: int
    kind: str
    position: int | None
    what: str

    def __str__(self) -> str:
        place = "the end" if self.position is None else f"token {self.position}"
        return (
            f"{self.side}, concurrency {self.concurrency}, request {self.request} ({self.kind}): {place}: {self.what}"
        )


@dataclass
class Report:
    """What was compared, what differed, and what happened meanwhile."""

    state: Verdict
    reasons: list[str]
    compared: int
    tokens: int
    differences: list[Difference]
    seen: dict[str, dict[str, float]]


def sides_of_recipe(recipe: Callable[[bool, tuple[str, ...]], Choice]) -> list[Side]:
    """The four servers of a recipe, the reference first; `recipe` makes a choice of (speculate, settings)."""

    def side(speculates: bool, caches: bool) -> Side:
        label = f"{'EAGLE3' if speculates else 'plain'}, prefix cache {'on' if caches else 'off'}"
        choice = recipe(speculates, (f"disable-radix-cache={'false' if caches else 'true'}", *_SETTINGS))
        return Side(choice, label, speculates, caches, True)

    return [side(speculates, caches) for speculates in (False, True) for caches in (False, True)]


def run(sides: Sequence[Side], plan: Plan, console: Console) -> tuple[Path, Report]:
    """Ask all sides, one after the other; the first one's answers, one at a time, are what is expected of all."""
    for side in sides:
        side.choice.check()
    folder = new_run_dir("eval-lossless", plan.runs)
    report = Report(Verdict.PASS, [], 0, 0, [], {})
    asked: list[Request] = []
    expected: list[Tokens] = []
    model = ""
    for number, side in enumerate(sides):
        with (
            reached(side.choice, folder, console, f"side{number}") as target,
            Probe(target.base_url, target.api_key) as probe,
        ):
            model = target.model
            with console.status(f"{side.label}: one request after the other"):
                if not asked:
                    asked, expected = _expectation(probe, model, plan)
            for concurrency in plan.concurrencies:
                with console.status(f"{side.label}: {len(asked)} requests at concurrency {concurrency}"):
                    found = _in_another_order(probe, asked, concurrency, seed=f"{number}-{concurrency}")
                report.compared += len(asked)
                report.tokens += sum(len(each.ids) for each in found)
                report.differences += differences(asked, expected, found, side.label, concurrency)
                _count(report.seen.setdefault(side.label, {}), found)
            report.seen[side.label]["retracted"] = read(target.base_url).total(RETRACTED) or 0.0
        console.print(f"[green]✓[/] {side.label}: {report.seen[side.label]}")
    _judge(report, sides, asked, plan)
    servers = {side.label: side.choice.base_url or side.choice.recipe for side in sides}
    write_json(folder / RECORD, record(KIND, servers, {}, plan=asdict(plan), model=model))
    write_json(folder / "result.json", _result(sides, asked, expected, report, plan))
    write_page(folder)
    return folder, report


def differences(
    asked: Sequence[Request], expected: Sequence[Tokens], found: Sequence[Tokens], side: str, concurrency: int
) -> list[Difference]:
    """Every answer of `found` that is not bit for bit the expected one, and where it parts."""
    out = []
    for number, (request, want, got) in enumerate(zip(asked, expected, found, strict=True)):
        position, what = _first(want, got)
        if what:
            out.append(Difference(side, concurrency, number, request.kind, position, what))
    return out


def _first(want: Tokens, got: Tokens) -> tuple[int | None, str]:
    """Where two answers part and how; no words when they are the same."""
    if REFUSED in (want.finish_reason, got.finish_reason) and want != got:
        return None, f"{want.text[:80]!r} ({want.finish_reason}), found {got.text[:80]!r} ({got.finish_reason})"
    token = first_difference(want.ids, got.ids)
    place = first_difference(want.top, got.top)
    if place is not None and (token is None or place <= token):
        pair = [each.top[place] if place < len(each.top) else () for each in (want, got)]
        numbers = [{token: logprob for logprob, token in top} for top in pair]
        apart = max((abs(numbers[0][t] - numbers[1][t]) for t in numbers[0].keys() & numbers[1].keys()), default=0.0)
        return place, f"other logprobs, up to {apart:.3g} apart; best {pair[0][:2]}, found {pair[1][:2]}"
    if token is not None:
        return token, f"ids {want.ids[token : token + 3]}, found {got.ids[token : token + 3]}"
    if (want.text, want.finish_reason) != (got.text, got.finish_reason):
        return None, f"{want.text[-20:]!r} ({want.finish_reason}), found {got.text[-20:]!r} ({got.finish_reason})"
    return None, ""


def _expectation(probe: Probe, model: str, plan: Plan) -> tuple[list[Request], list[Tokens]]:
    """The requests and their answers, one after the other; a stop string is a piece of an answer's middle."""
    asked = _requests(probe, model, plan)
    expected = [ask(probe, request) for request in asked]
    cut = [
        _with(request, "stop string", stop=answer.text[len(answer.text) // 2 :][:3])
        for request, answer in list(zip(asked, expected, strict=True))[2::3]  # none of the long prompts
        if answer.finish_reason != REFUSED and len(answer.text) > 3 and "\ufffd" not in answer.text
    ]
    return asked + cut, expected + [ask(probe, request) for request in cut]


def _requests(probe: Probe, model: str, plan: Plan) -> list[Request]:
    """Prompts of all kinds in the model's own template: a tenth declares a tool, one in 24 has over 4,000 tokens."""
    out = []
    for number, prompt in enumerate(prompts(plan.prompts)):
        kind, text, tools, most = prompt.kind, prompt.text, None, plan.max_tokens
        if number % 10 == 0:
            kind, text, tools = "tools", f"What is the weather in Paris? {number}", [_TOOL]
        elif number % 24 == 3:
            kind = "very long"
            text = " ".join(p.question for p in tiny.problems("held_out", _VERY_LONG_QUESTIONS, seed=500 + number))
        elif number % 12 == 4:
            kind, most = "one token", 1
        out.append(Request(kind, probe.chat_ids(text, model, tools), _params(plan, number, most)))
    return [*out, Request("one token", out[0].ids[:1], _params(plan, len(out), plan.max_tokens))]


def _params(plan: Plan, number: int, most: int) -> dict[str, Any]:
    """Sampling parameters of request `number`, which may produce `most` tokens."""
    kinds = ASKS[plan.ask]
    params = {"sampling_seed": number, **kinds[number % len(kinds)], "max_new_tokens": most}
    return params | {"min_new_tokens": min(params.get("min_new_tokens", 0), most)}


def _with(request: Request, kind: str, **params: Any) -> Request:
    return replace(request, kind=kind, params=request.params | params)


def ask(probe: Probe, request: Request) -> Tokens:
    """The server's answer, with the logprobs of its best candidates; a 400 counts as one, to be the same everywhere."""
    try:
        return probe.answer(request.ids, request.params, with_top=True)
    except Refused as refused:
        if refused.status != 400:
            raise
        return Tokens((), refused.message, REFUSED)


def _in_another_order(probe: Probe, asked: list[Request], concurrency: int, seed: str) -> list[Tokens]:
    """All answers, asked for in a shuffled order; from two at a time on, with clients that leave beside them."""
    order = list(range(len(asked)))
    random.Random(seed).shuffle(order)
    with _leavers(probe, asked, seed if concurrency > 1 else None):
        found = probe.all(lambda number: ask(probe, asked[number]), order, concurrency)
    return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


@contextmanager
def _leavers(probe: Probe, asked: list[Request], seed: str | None) -> Iterator[None]:
    """Clients that ask the same and go away after a few tokens, until the block ends; none without a seed."""
    over = threading.Event()
    short = [request.ids for request in asked if len(request.ids) <= _LEFT]  # prefill of the others is most of the time

    def leave(name: str) -> None:
        rng = random.Random(name)
        while not over.wait(rng.random()):
            probe.leave(rng.choice(short), pieces=rng.randint(1, 6))

    threads = [threading.Thread(target=leave, args=(f"{seed}-{n}",)) for n in range(_LEAVERS if seed else 0)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _count(seen: dict[str, float], found: Sequence[Tokens]) -> None:
    steps = sum(answer.verify_steps for answer in found)
    for name, value in (
        ("verify steps", steps),
        ("tokens of verify steps", sum(len(answer.ids) - 1 for answer in found) if steps else 0),
        ("prompt tokens from the cache", sum(answer.cached for answer in found)),
        ("refused with 400", sum(answer.finish_reason == REFUSED for answer in found)),
    ):
        seen[name] = seen.get(name, 0) + value


def _judge(report: Report, sides: Sequence[Side], asked: list[Request], plan: Plan) -> None:
    """Fail for any difference; invalid when what the sides are for did not happen."""
    missing = []
    for side in sides:
        seen = report.seen[side.label]
        if side.speculates and seen["tokens of verify steps"] <= seen["verify steps"]:
            missing.append(f"{side.label}: no draft was accepted")
        if side.caches and not seen["prompt tokens from the cache"]:
            missing.append(f"{side.label}: nothing was found in the prefix cache")
        if side.retracts and not seen["retracted"]:
            missing.append(f"{side.label}: no request was retracted")
    kinds = Counter(request.kind for request in asked)
    longest = max(len(request.ids) for request in asked)
    if kinds["very long"] and longest <= _VERY_LONG:
        missing.append(f"the longest prompt has {longest} tokens, not over {_VERY_LONG}")
    report.state = Verdict.FAIL if report.differences else Verdict.INVALID if missing else Verdict.PASS
    report.reasons = [
        f"{report.compared - len(report.differences)} of {report.compared} {plan.ask} answers ({report.tokens} tokens) "
        f"have the expected tokens and logprobs, bit for bit; no rule for ties",
        f"{len(asked)} requests ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}; up to {longest} prompt "
        f"tokens) to {len(sides)} servers at concurrency {', '.join(map(str, plan.concurrencies))}",
        *missing,
        *[str(each) for each in report.differences[:_LISTED]],
    ]


def _result(
    sides: Sequence[Side], asked: list[Request], expected: list[Tokens], report: Report, plan: Plan
) -> dict[str, Any]:
    return {
        "kind": KIND,
        "configuration": f"{len(sides)} servers, exact",
        "plan": asdict(plan),
        "report": {**asdict(report), "divergences": []},
        "requests": [asdict(request) for request in asked],
        "expected": [answer.text for answer in expected],
    }

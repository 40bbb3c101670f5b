"""`kimi-w4a8 eval lossless --exact`: bit-for-bit comparison of answers, with no rule for ties.

The reference is a server without speculation and without prefix cache that answers one request at a time. Every other
server must return the same tokens and logprobs: with EAGLE3, with the prefix cache, and with many concurrent requests
in another order, some of them aborted or retracted. Requests are greedy, sampled with seeds, or penalized. The check
needs logits that do not depend on the batch. SGLang's CPU engine with this package's operators has this property.
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

from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT
from kimi_w4a8_eagle3.engine.client import Refused
from kimi_w4a8_eagle3.engine.metrics import read_once
from kimi_w4a8_lab.accuracy.comparison import Difference, first_difference
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.prompts import prompts
from kimi_w4a8_lab.accuracy.results import ExactReport, ExactResult
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_lab.base.run_folder import RunFolder
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.base.verdict import Verdict

RETRACTED = "sglang:num_retracted_requests_total"
REFUSED = "HTTP 400"  # stands in for the finish reason
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
_LEAVERS, _LEFT = 3, 1000  # clients that disconnect during an answer, and the longest prompt they send
# SGLang retracts a running request every 25 forward passes, as a full KV pool would.
_SETTINGS = ("env.SGLANG_TEST_RETRACT=1", "env.SGLANG_TEST_RETRACT_INTERVAL=25")
_LISTED = 8
# Sampling parameters that the requests take in turn, by the value of --ask. A request's number is its seed.
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
class ExactPlan:
    """Size of the comparison. A third of the prompts is sent a second time with a stop string."""

    prompts: int = 72
    max_tokens: int = 64
    ask: str = "mixed"
    concurrencies: tuple[int, ...] = CONCURRENCIES
    runs: Path = DEFAULT_ROOT


@dataclass(frozen=True)
class ExactRequest:
    kind: str
    ids: tuple[int, ...]
    params: dict[str, Any]


@dataclass(frozen=True)
class ComparedServer:
    """One server and the behaviours it must show; the run is invalid if one does not occur."""

    target: Target
    label: str
    speculates: bool
    caches: bool = False
    retracts: bool = False


def compare(
    reference: Target, target: Target, prompts: int, max_tokens: int, ask: str, runs: Path, console: Console
) -> tuple[Path, ExactReport]:
    """Compare two running servers, or a recipe's four; return the run directory and the report."""
    if target.recipe is None:
        sides = [ComparedServer(reference, "reference", False), ComparedServer(target, "EAGLE3", True)]
    else:
        sides = sides_of_recipe(
            lambda draft, words: replace(target if draft else reference, settings=(*words, *target.settings))
        )
    return run(sides, ExactPlan(prompts, max_tokens, ask, runs=runs), console)


def sides_of_recipe(recipe: Callable[[bool, tuple[str, ...]], Target]) -> list[ComparedServer]:
    """Return a recipe's four servers, the reference first; `recipe` makes a target from (speculate, settings)."""

    def side(speculates: bool, caches: bool) -> ComparedServer:
        label = f"{'EAGLE3' if speculates else 'plain'}, prefix cache {'on' if caches else 'off'}"
        target = recipe(speculates, (f"disable-radix-cache={'false' if caches else 'true'}", *_SETTINGS))
        return ComparedServer(target, label, speculates, caches, True)

    return [side(speculates, caches) for speculates in (False, True) for caches in (False, True)]


def run(sides: Sequence[ComparedServer], plan: ExactPlan, console: Console) -> tuple[Path, ExactReport]:
    """Ask all servers, one after the other. The first one's sequential answers are expected from all of them."""
    for side in sides:
        side.target.check()
    targets = {side.label: side.target for side in sides}
    kept = RunFolder[ExactResult].begin(ExactResult.kind, plan.runs, targets, "eval-lossless", plan=asdict(plan))
    report = ExactReport()
    asked: list[ExactRequest] = []
    expected: list[Tokens] = []
    model = ""
    for number, side in enumerate(sides):
        with (
            side.target.running(kept.folder / f"side{number}.log", console.print) as server,
            TokenClient(*server.engine) as probe,
        ):
            model = server.model
            with console.status(f"{side.label}: one request after the other"):
                if not asked:
                    asked, expected = _expectation(probe, model, plan)
            for concurrency in plan.concurrencies:
                with console.status(f"{side.label}: {len(asked)} requests at concurrency {concurrency}"):
                    found = _in_another_order(probe, asked, concurrency, seed=f"{number}-{concurrency}")
                report.compared += len(asked)
                report.tokens += sum(len(answer.ids) for answer in found)
                report.differences += differences(asked, expected, found, side.label, concurrency)
                _count(report.seen.setdefault(side.label, {}), found)
            report.seen[side.label]["retracted"] = int(read_once(*server.engine).total(RETRACTED) or 0)
        console.print(f"[green]✓[/] {side.label}: {report.seen[side.label]}")
    _judge(report, sides, asked, plan)
    result = ExactResult(
        configuration=f"{len(sides)} servers, exact", model=model, verdict=report,
        asked=[asdict(request) for request in asked], expected=[answer.text for answer in expected],
    )  # fmt: skip
    kept.save(result)
    return kept.folder, report


def differences(
    asked: Sequence[ExactRequest], expected: Sequence[Tokens], found: Sequence[Tokens], side: str, concurrency: int
) -> list[Difference]:
    """Return the answers that are not bit for bit the expected ones, with their first differing position."""
    out = []
    for number, (request, want, got) in enumerate(zip(asked, expected, found, strict=True)):
        position, what = _first(want, got)
        if what:
            out.append(Difference(side, concurrency, number, request.kind, position, what))
    return out


def _first(want: Tokens, got: Tokens) -> tuple[int | None, str]:
    """Return the first differing position and a description, which is empty for equal answers."""
    if REFUSED in (want.finish_reason, got.finish_reason) and want != got:
        return None, f"{want.text[:80]!r} ({want.finish_reason}), found {got.text[:80]!r} ({got.finish_reason})"
    token = first_difference(want.ids, got.ids)
    place = first_difference(want.top, got.top)
    if place is not None and (token is None or place <= token):
        pair = [answer.top[place] if place < len(answer.top) else () for answer in (want, got)]
        numbers = [{token: logprob for logprob, token in top} for top in pair]
        apart = max((abs(numbers[0][t] - numbers[1][t]) for t in numbers[0].keys() & numbers[1].keys()), default=0.0)
        return place, f"other logprobs, up to {apart:.3g} apart; best {pair[0][:2]}, found {pair[1][:2]}"
    if token is not None:
        return token, f"ids {want.ids[token : token + 3]}, found {got.ids[token : token + 3]}"
    if (want.text, want.finish_reason) != (got.text, got.finish_reason):
        return None, f"{want.text[-20:]!r} ({want.finish_reason}), found {got.text[-20:]!r} ({got.finish_reason})"
    return None, ""


def _expectation(probe: TokenClient, model: str, plan: ExactPlan) -> tuple[list[ExactRequest], list[Tokens]]:
    """Return the requests and their sequential answers. A stop string is a piece from the middle of an answer."""
    asked = _requests(probe, model, plan)
    expected = [ask(probe, request) for request in asked]
    cut = [
        _with(request, "stop string", stop=answer.text[len(answer.text) // 2 :][:3])
        for request, answer in list(zip(asked, expected, strict=True))[2::3]  # none of the long prompts
        if answer.finish_reason != REFUSED and len(answer.text) > 3 and "\ufffd" not in answer.text
    ]
    return asked + cut, expected + [ask(probe, request) for request in cut]


def _requests(probe: TokenClient, model: str, plan: ExactPlan) -> list[ExactRequest]:
    """Make prompts of all kinds in the model's chat template: 1 in 10 declares a tool, 1 in 24 exceeds 4,000 tokens."""
    out = []
    for number, prompt in enumerate(prompts(plan.prompts)):
        kind, text, tools, most = prompt.kind, prompt.text, None, plan.max_tokens
        if number % 10 == 0:
            kind, text, tools = "tools", f"What is the weather in Paris? {number}", [_TOOL]
        elif number % 24 == 3:
            kind = "very long"
            text = " ".join(p.question for p in problems(_VERY_LONG_QUESTIONS, 500 + number))
        elif number % 12 == 4:
            kind, most = "one token", 1
        out.append(ExactRequest(kind, probe.chat_ids(text, model, tools), _params(plan, number, most)))
    return [*out, ExactRequest("one token", out[0].ids[:1], _params(plan, len(out), plan.max_tokens))]


def _params(plan: ExactPlan, number: int, most: int) -> dict[str, Any]:
    """Return the sampling parameters of request `number`, limited to `most` tokens."""
    kinds = ASKS[plan.ask]
    params = {"sampling_seed": number, **kinds[number % len(kinds)], "max_new_tokens": most}
    return params | {"min_new_tokens": min(params.get("min_new_tokens", 0), most)}


def _with(request: ExactRequest, kind: str, **params: Any) -> ExactRequest:
    return replace(request, kind=kind, params=request.params | params)


def ask(probe: TokenClient, request: ExactRequest, with_top: bool = True) -> Tokens:
    """Return the answer, and the top logprobs of its tokens. A 400 is an answer too: the same on every server."""
    try:
        return probe.answer(request.ids, request.params, with_top)
    except Refused as refused:
        if refused.status != 400:
            raise
        return Tokens((), refused.message, REFUSED)


def _in_another_order(probe: TokenClient, asked: list[ExactRequest], concurrency: int, seed: str) -> list[Tokens]:
    """Return all answers, requested in shuffled order, with disconnecting clients from concurrency 2 on."""
    order = list(range(len(asked)))
    random.Random(seed).shuffle(order)
    with _leavers(probe, asked, seed if concurrency > 1 else None):
        found = probe.all(lambda number: ask(probe, asked[number]), order, concurrency)
    return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


@contextmanager
def _leavers(probe: TokenClient, asked: list[ExactRequest], seed: str | None) -> Iterator[None]:
    """Until the block ends, run clients that disconnect after a few tokens; without a seed there are none."""
    over = threading.Event()
    short = [request.ids for request in asked if len(request.ids) <= _LEFT]  # longer ones take too long to prefill

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


def _count(seen: dict[str, int], found: Sequence[Tokens]) -> None:
    steps = sum(answer.verify_steps for answer in found)
    for name, value in (
        ("verify steps", steps),
        ("tokens of verify steps", sum(len(answer.ids) - 1 for answer in found) if steps else 0),
        ("prompt tokens from the cache", sum(answer.cached for answer in found)),
        ("refused with 400", sum(answer.finish_reason == REFUSED for answer in found)),
    ):
        seen[name] = seen.get(name, 0) + value


def _judge(report: ExactReport, sides: Sequence[ComparedServer], asked: list[ExactRequest], plan: ExactPlan) -> None:
    """Fail for any difference; report INVALID when a server did not show the behaviours it is there for."""
    missing = []
    for side in sides:
        seen = report.seen[side.label]
        if side.speculates and seen["tokens of verify steps"] <= seen["verify steps"]:
            missing.append(f"{side.label}: no draft token was accepted")
        if side.caches and not seen["prompt tokens from the cache"]:
            missing.append(f"{side.label}: the prefix cache had no hit")
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
        *map(str, report.differences[:_LISTED]),
    ]

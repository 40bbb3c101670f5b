"""Compare the distribution of sampled tokens with the target's, with EAGLE3 and without.  python -m proof.sampling

Two servers of the built-in model continue the same prefixes under several sampling settings, without seeds; every
position is compared by chi-squared tests (adjusted for their number). Then the draw alone is held against probabilities
that are known, by position of a verify step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from kimi_w4a8_eagle3.base.run_dir import new_run_dir, write_json
from kimi_w4a8_eagle3.sampling.draw import Filters, draw
from kimi_w4a8_lab.accuracy import sampling_match
from kimi_w4a8_lab.accuracy.sampling_match import ALPHA, LENGTH, Samples
from kimi_w4a8_lab.accuracy.tokens import TokenClient
from kimi_w4a8_lab.base.server_under_test import Target

from .tiny.problems import problems

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.0": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
}
_CANDIDATES = 48  # prefixes, of which the least certain are taken
_BEGINNING = 5  # tokens of another question that begin the answer
_CHOICES = 100  # of a request
_DRAFT_TOKENS = 4


def prefixes(probe: TokenClient, model: str, number: int) -> list[tuple[int, ...]]:
    """Prompts with a beginning of an answer after which the model is least certain.

    The beginnings are tokens of other questions. An answer of its own would not do: the model is sure of it, so that
    all samples would be the same.
    """
    asked = [probe.chat_ids(problem.question, model) for problem in problems("held_out", _CANDIDATES, seed=77)]
    shifted = [*asked[1:], asked[0]]
    candidates = [(*ids, *other[-_BEGINNING - 8 : -8]) for ids, other in zip(asked, shifted, strict=True)]
    return sorted(candidates, key=lambda ids: probe.greedy(ids, 1, with_top=True).top[0][0][0])[:number]


def samples(probe: TokenClient, starts: Sequence[tuple[int, ...]], number: int) -> list[Samples]:
    """`number` continuations of each prefix under each setting, in the order of SETTINGS and prefixes."""
    return [_continuations(probe, start, params, number) for params in SETTINGS.values() for start in starts]


def _continuations(probe: TokenClient, start: tuple[int, ...], params: dict[str, Any], number: int) -> Samples:
    sizes = [min(_CHOICES, number - done) for done in range(0, number, _CHOICES)]
    return [tokens for n in sizes for tokens in probe.samples(start, {**params, "max_new_tokens": LENGTH}, n)]


def draws_by_position(tokens: int) -> Iterator[tuple[int, float]]:
    """(position of a verify step, p) for `tokens` draws: 64 token ids, probabilities that change from row to row."""
    rng = torch.Generator().manual_seed(7)
    kinds = torch.softmax(torch.randn(16, 64, generator=rng) * 1.5, -1)
    rows = tokens // _DRAFT_TOKENS
    filters = Filters(torch.full((rows,), 1 << 30, dtype=torch.int32), torch.ones(rows), torch.zeros(rows), False)
    seeds, starts = (
        torch.randint(-(2**62), 2**62, (rows,), generator=rng),
        torch.randint(0, 99_999, (rows,), generator=rng),
    )
    for position in range(_DRAFT_TOKENS):
        which = torch.arange(rows) % len(kinds)
        drawn = draw(kinds[which], filters, seeds, starts + position)
        seen = np.zeros(kinds.shape)
        np.add.at(seen, (which.numpy(), drawn.numpy()), 1)
        wanted = kinds.double().numpy()
        wanted *= seen.sum(1, keepdims=True) / wanted.sum(1, keepdims=True)
        yield position, float(stats.chisquare(seen, wanted, ddof=len(kinds) - 1, axis=None).pvalue)


def main(words: list[str]) -> int:
    """Run both parts; 1 when a test rejects."""
    parser = argparse.ArgumentParser(prog="python -m proof.sampling", description=__doc__)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=1_000_000)
    options = parser.parse_args(words)
    console, folder = Console(), new_run_dir("proof-sampling", Path("runs"))
    starts: list[tuple[int, ...]] = []
    found: list[list[Samples]] = []
    for recipe, name in (("tiny:plain", "plain"), ("tiny", "EAGLE3")):
        target = Target(recipe=recipe, settings=("disable-radix-cache=false",))
        with (
            target.running(folder / f"{name}.log", console.print) as server,
            TokenClient(server.base_url, server.api_key) as probe,
            console.status(f"{name}: {options.samples} continuations of each prefix under {len(SETTINGS)} settings"),
        ):
            starts = starts or prefixes(probe, server.model, options.prefixes)
            found.append(samples(probe, starts, options.samples))
    plain, speculated = found
    match = sampling_match.compare(plain, speculated, temperature=1.0)
    table = Table("setting", "tests", "smallest p", "adjusted", "different continuations, plain and EAGLE3")
    untested = False
    for number, setting in enumerate(SETTINGS):
        mine = range(number * options.prefixes, (number + 1) * options.prefixes)
        tests = [test for test in match.tests if test.prefix in mine]
        kinds = [sum(len(set(side[prefix])) for prefix in mine) for side in found]
        smallest = [min((getattr(test, what) for test in tests), default=1.0) for what in ("p", "adjusted_p")]
        untested = untested or {test.prefix for test in tests} != set(mine)
        table.add_row(setting, str(len(tests)), *(f"{p:.3g}" for p in smallest), f"{kinds[0]}, {kinds[1]}")
    console.print(table)
    positions = list(draws_by_position(options.draws))
    for position, p in positions:
        console.print(f"position {position} of a verify step, {options.draws // _DRAFT_TOKENS:,} draws: p = {p:.3g}")
    failed = match.differs or untested or any(p < ALPHA for _, p in positions)
    write_json(folder / "result.json", {"tests": [vars(test) for test in match.tests], "positions": positions})
    console.print(f"{'FAIL' if failed else 'PASS'}: {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

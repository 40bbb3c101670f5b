"""`python -m proof.prefix_cache`: the prefix cache changes no answer, with and without drafts.

Conversations behind one system prompt are answered cold, warm, after their prompts were evicted, and all at once in a
KV pool that is too small for them, so that some are retracted. The tokens must stay the same, and of a known prompt no
more is computed again than its last token, and with EAGLE3, whose keys are pairs of tokens, the one before.
An answer is compared up to its first near tie, which rounding may turn (`proof/load/load_questions.py`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_lab.base.counters import read
from kimi_w4a8_lab.base.server_under_test import Target

from .load.load_questions import CLEAR_GAP, gap, served_model
from .tiny.problems import problems

POOL = 768  # tokens of the KV pool: two conversations, but not all their answers at once
# Requests are admitted as if they would not grow, so that they fill the pool and some must go again.
SETTINGS = ("disable-radix-cache=false", f"max-total-tokens={POOL}", "schedule-conservativeness=0.01")
EVICTED, RETRACTED = "sglang:evicted_tokens_total", "sglang:num_retracted_requests_total"
_SYSTEM = "You are a careful teacher of maths. Be brief."
_TURNS = 2
_CROWD = 8  # of each request at once
_CLEAR = 8  # tokens of an answer that are compared, at least on average
_TIMEOUT_S = 600.0

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class CachedAnswer:
    """One answer: its tokens, its message, how long the prompt was and how much of it the cache had.

    clear: tokens before the first that was nearly another one.
    """

    token_ids: tuple[int, ...]
    message: dict[str, Any]
    prompt: int
    cached: int
    clear: int


@dataclass(frozen=True)
class CacheState:
    """The same requests in one state of the cache."""

    name: str
    answers: Sequence[CachedAnswer]

    @property
    def hits(self) -> float:
        """Share of the prompts' tokens that was in the cache."""
        return sum(answer.cached for answer in self.answers) / sum(answer.prompt for answer in self.answers)


class Prover:
    """Client of one server with a small pool and a prefix cache that has no other clients."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self._model = http, served_model(http)

    def states(self, users: int) -> list[CacheState]:
        """Cold, warm, evicted, retracted, for the conversations of so many users."""
        self._http.post("/flush_cache").raise_for_status()
        cold = self._conversations(users)
        requests = [messages for messages, _ in cold]
        warm = [self._ask(messages) for messages in requests]
        self._until_grown(EVICTED, POOL, self._fill)
        evicted = [self._ask(messages) for messages in requests]
        together: list[CachedAnswer] = []

        def crowd() -> None:
            with ThreadPoolExecutor(_CROWD * len(requests)) as pool:
                endless = partial(self._ask, ignore_eos=True)  # they fill the pool whatever they say
                together.extend(pool.map(endless, _CROWD * requests))

        self._until_grown(RETRACTED, 1, crowd)
        same = [together[at :: len(requests)] for at in range(len(requests))]
        # Of the many answers to one request, one that differs stands for all.
        pairs = zip(same, (answer for _, answer in cold), strict=True)
        odd = [next((again for again in many if differs(first, again)), many[0]) for many, first in pairs]
        named = {"cold": [answer for _, answer in cold], "warm": warm, "evicted": evicted, "retracted": odd}
        return [CacheState(name, answers) for name, answers in named.items()]

    def _conversations(self, users: int) -> list[tuple[Messages, CachedAnswer]]:
        found: list[tuple[Messages, CachedAnswer]] = []
        questions = iter(problems("held_out", users * _TURNS, seed=15))
        for _ in range(users):
            messages: Messages = [{"role": "system", "content": _SYSTEM}]
            for _ in range(_TURNS):
                messages = [*messages, {"role": "user", "content": next(questions).question}]
                found.append((messages, self._ask(messages, logprobs=True, top_logprobs=2)))
                messages = [*messages, found[-1][1].message]
        return found

    def _fill(self) -> None:
        """A prompt without a shared prefix, half of the pool long."""
        for seed in range(6):
            text = " ".join(problem.question for problem in problems("train", 12, seed=seed))
            self._ask([{"role": "user", "content": text}], max_tokens=1)

    def _until_grown(self, counter: str, by: float, act: Any, attempts: int = 8) -> None:
        before = read(str(self._http.base_url).rstrip("/")).total(counter) or 0.0
        for _ in range(attempts):
            act()
            if (read(str(self._http.base_url).rstrip("/")).total(counter) or 0.0) >= before + by:
                return
        raise AssertionError(f"{counter} did not grow by {by}")

    def _ask(self, messages: Messages, max_tokens: int = 48, **more: Any) -> CachedAnswer:
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0}
        response = self._http.post("/v1/chat/completions", json={**body, "return_token_ids": True, **more})
        response.raise_for_status()
        answer = response.json()
        choice, usage = answer["choices"][0], answer["usage"]
        places = (choice["logprobs"] or {}).get("content", ())
        return CachedAnswer(
            token_ids=tuple(choice["response_token_ids"]),
            message=choice["message"],
            prompt=usage["prompt_tokens"],
            cached=(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
            clear=sum(1 for _ in takewhile(lambda place: gap(place) >= CLEAR_GAP, places)),
        )


def differs(first: CachedAnswer, again: CachedAnswer) -> bool:
    """True if tokens differ where rounding cannot be the reason."""
    return first.token_ids[: first.clear] != again.token_ids[: first.clear]


def faults(states: Sequence[CacheState], drafts: bool) -> list[str]:
    """One sentence for each state that is not as it must be."""
    cold, warm, evicted, _ = states
    found = [
        f"{state.name}: answer {at} has other tokens than cold"
        for state in states[1:]
        for at, (first, again) in enumerate(zip(cold.answers, state.answers, strict=True))
        if differs(first, again)
    ]
    if sum(first.clear for first in cold.answers) < len(cold.answers) * _CLEAR:
        found.append(f"the answers are clear for fewer than {_CLEAR} tokens on average: nothing was compared")
    for first, second in zip(cold.answers[::_TURNS], cold.answers[1::_TURNS], strict=True):
        if second.cached < first.prompt - drafts:
            found.append(f"cold: {second.cached} tokens of a first turn's {first.prompt} were found in the second")
    found += [
        f"warm: {answer.cached} tokens of a known prompt of {answer.prompt} were found"
        for answer in warm.answers
        if answer.cached != answer.prompt - 1 - drafts
    ]
    return found if evicted.answers[0].cached < warm.answers[0].cached else [*found, "nothing was evicted"]


def main() -> int:
    """Prove it with and without drafts, on servers of its own."""
    table = Table("server", "state", "requests", "prompt tokens from the cache")
    found: list[str] = []
    for drafts in (True, False):
        target = Target(recipe="tiny" if drafts else "tiny:plain", settings=SETTINGS)
        with (
            tempfile.TemporaryDirectory() as folder,
            target.running(Path(folder) / "server.log", print) as server,
            httpx.Client(base_url=server.base_url, timeout=_TIMEOUT_S) as http,
        ):
            states = Prover(http).states(users=2)
        name = "EAGLE3" if drafts else "no drafts"
        for state in states:
            table.add_row(name, state.name, str(len(state.answers)), f"{state.hits:.1%}")
        found += [f"{name}: {fault}" for fault in faults(states, drafts)]
    table_console().print(table)
    print("\n".join(found) or "the same tokens in every state")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Requests of a soak, all from one seed: short and long prompts and answers, clients of every manner."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

import httpx

from ..load.load_questions import Question, known_questions
from ..load.load_request import ClientOutcome, Manner, Record
from ..tiny.problems import problems

# Of fourteen requests: nine are answered, three are left by their clients, two must be refused.
MIX: Mapping[Manner, int] = {
    Manner.STREAM: 6,
    Manner.LEAVES_STREAM: 2,
    Manner.PLAIN: 3,
    Manner.BAD: 2,
    Manner.LEAVES_PLAIN: 1,
}
_LEAVE_AFTER = 12  # pieces at most, or tenths of a second
# Earlier turns (about 80 tokens each) and answer tokens of questions whose answer is not known beforehand.
_LONG = ((12, 24), (40, 16), (0, 200), (12, 8), (0, 300), (20, 48), (0, 8), (0, 400))
_OVERSIZED_BYTES = 40 << 20  # the door and the router take 32 MiB
_OVERSIZED_EVERY_S = 15.0


def questions(base_url: str, seed: int, known: int = 24) -> list[Question]:
    """Questions in an order of their own for every seed.

    Three quarters have a known answer. The others are long in prompt or answer and run for an exact number of tokens;
    the model wavers there, so their text is compared with the server's own list of its tokens.
    """
    found = known_questions(base_url, known, seed=seed)
    drawn = iter(problems("held_out", sum(turns + 1 for turns, _ in _LONG), seed=seed + 1))
    for turns, max_tokens in _LONG:
        messages: list[tuple[str, str]] = []
        for _ in range(turns):
            problem = next(drawn)
            messages += [("user", problem.question), ("assistant", problem.solution)]
        messages.append(("user", next(drawn).question))
        found.append(Question(found[0].model, tuple(messages), max_tokens, ignore_eos=True, counted=True))
    random.Random(seed).shuffle(found)
    return found


def leave_after(seed: int) -> Callable[[], int]:
    """Draws when a client that leaves does so."""
    drawn = random.Random(seed)
    return lambda: drawn.randint(1, _LEAVE_AFTER)


class Oversized:
    """A client that sends a body of 40 MiB every 15 seconds between entry and exit of a `with` block."""

    def __init__(self, base_url: str) -> None:
        self.records: list[Record] = []
        self._http = httpx.Client(base_url=base_url, timeout=60.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oversized", daemon=True)

    def __enter__(self) -> Oversized:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()

    def _run(self) -> None:
        while not self._stop.wait(_OVERSIZED_EVERY_S):
            self.records.append(self._send())

    def _send(self) -> Record:
        record = Record(Manner.BAD, -1, time.time(), outcome=ClientOutcome.REFUSED)
        body = b'{"messages": "' + bytes(_OVERSIZED_BYTES)
        try:
            response = self._http.post("/v1/chat/completions", content=body)
            record.status, record.detail = response.status_code, response.text[:300]
            if response.status_code != 413:
                record.outcome = ClientOutcome.WRONG
        except httpx.HTTPError as error:
            record.outcome, record.detail = ClientOutcome.CUT, f"oversized body: {type(error).__name__}: {error}"
        record.ended = time.time()
        return record

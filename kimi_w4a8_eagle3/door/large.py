"""Large bodies: a worker measures what reading one costs, and threads read it beside the event loop.

The engine reads a body in its event loop, in calls that nothing interrupts. Many small parts take 8 µs each, so a body
of 2 MB can take half a second. The worker reads it as the door does, which takes a third longer than the engine needs.
It also counts the tokens of long texts: some tokenizers make an object of each, and free millions in one call.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson

from .admission import WorkerJob
from .answers import CONTEXT_EXCEEDED, Refusal
from .rules import Admitted, RequestRules
from .shape import texts
from .shares import Places

THREAD_BYTES = 2**13  # the engine needs at most 60 ms for what a smaller body holds: schemas of tools take longest
WORKER_BYTES = 2**17  # a smaller body takes at most 50 ms to read, unless it has more than so many objects:
WORKER_OBJECTS = 512  # one that its request model refuses takes 0.5 ms, for a message that names every alternative
COUNTED_CHARACTERS = 2**20  # a shorter text has at most so many tokens, which stop the event loop for 80 ms
_PIECE = 2**18  # characters that are tokenized at a time: most texts that are too long end the count early
_CUTS = 1.01  # a cut may split a token, so more tokens may be counted than there are
_CPU_S = 10.0  # until a worker is killed
_READ_S, _PICTURE_S = 0.12, 5e-9  # for a body, and more for each character of its pictures

# The places that the request of this context waits for if it is large: it is handled in a thread where possible.
large_request = ContextVar[Places | None]("large_request", default=None)
# The second one is for light clients: they share the interpreter with the event loop, which waits longer for two.
THREADS = 2
NICE = 5  # where cores are few, the event loop and the schedulers go first
SWITCH_S = 0.0005  # that the event loop waits for the interpreter while a thread computes; Python's own 5 ms are long
Result = TypeVar("Result")
_threads = ThreadPoolExecutor(THREADS, "large-request", os.nice, (NICE,))  # each thread has its own niceness


async def in_thread(places: Places, work: Callable[[], Result], patient: bool = False) -> Result:
    """Return what `work` returns. It runs in a thread, when it is the client's turn."""
    async with places.place(patient):
        return await asyncio.get_running_loop().run_in_executor(_threads, work)


# Returns the tokens of a text.
Encode = Callable[[str], Sized]


def reading_job(rules: RequestRules, encode: Encode | None) -> WorkerJob:
    """Return the job that measures the reading of a body, given after its path and a newline.

    It also refuses long texts with more tokens than a prompt may have; `encode` is None without a tokenizer.
    """
    why = f"reading this body takes more than {_CPU_S:.0f} s of CPU time or 1 GiB: send fewer or larger parts"
    return WorkerJob(lambda: partial(measure, replace(rules, counted=False), encode), _CPU_S, why, bytes)


def measure(rules: RequestRules, encode: Encode | None, request: bytes) -> None:
    """Raise Refusal for a body that costs too much, or that the rules refuse: the engine's process reads neither."""
    path, _, body = request.partition(b"\n")
    start = time.process_time()
    admitted = rules.admit(path.decode(), {}, body)
    in_pictures = sum(len(source) for _, source in admitted.pictures)
    seconds, most_s = time.process_time() - start, _READ_S + in_pictures * _PICTURE_S
    if seconds > most_s:
        raise Refusal(
            f"reading this body takes {seconds * 1000:.0f} ms of CPU time, and {most_s * 1000:.0f} ms are allowed: "
            "send fewer messages, parts or tools"
        )
    if encode and admitted.characters > COUNTED_CHARACTERS:
        _count(encode, admitted, rules.max_tokens)


def _count(encode: Encode, admitted: Admitted, max_tokens: int) -> None:
    pictures = {form for _, source in admitted.pictures for form in (source, source.partition(",")[2])}
    tokens = 0
    for text in texts(orjson.loads(admitted.body)):
        for start in range(0, 0 if text in pictures else len(text), _PIECE):
            tokens += len(encode(text[start : start + _PIECE]))
            if tokens > max_tokens * _CUTS:
                why = f"prompt is too long: the text of this request is longer than {max_tokens} tokens"
                raise Refusal(why, code=CONTEXT_EXCEEDED)

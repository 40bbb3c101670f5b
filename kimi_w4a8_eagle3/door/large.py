"""Large bodies: a worker measures what reading one costs, and threads read it beside the event loop.

The engine reads a body in its event loop, in calls that nothing interrupts. Many small parts take 8 µs each, so a body
of 2 MB can take half a second. The worker reads it as the door does, which takes a third longer than the engine needs.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from .admission import WorkerJob
from .answers import Refusal
from .rules import RequestRules

THREAD_BYTES = 2**13  # the engine needs at most 60 ms for what a smaller body holds: schemas of tools take longest
WORKER_BYTES = 2**17  # a smaller body takes at most 50 ms to read
_CPU_S = 5.0  # until a worker is killed
_READ_S, _PICTURE_S = 0.12, 5e-9  # for a body, and more for each character of its pictures

# The request of this context is large, or inflates: it is handled in these threads where that is possible.
large_request = ContextVar("large_request", default=False)
# More of them would delay the event loop, which shares the interpreter with them.
threads = ThreadPoolExecutor(2, "large-request")


def reading_job(rules: RequestRules) -> WorkerJob:
    """Return the job that measures the reading of a body, given as path and text."""
    why = f"reading this body takes more than {_CPU_S:.0f} s of CPU time or 1 GiB: send fewer or larger parts"
    return WorkerJob(lambda: partial(measure, replace(rules, counted=False)), _CPU_S, why)


def measure(rules: RequestRules, request: list[str]) -> None:
    """Raise Refusal for a body that costs too much. Other refusals are left to the engine's process."""
    path, text = request
    start, in_pictures = time.process_time(), 0
    with suppress(Refusal):
        in_pictures = sum(len(source) for _, source in rules.admit(path, {}, text.encode()).pictures)
    seconds, most_s = time.process_time() - start, _READ_S + in_pictures * _PICTURE_S
    if seconds > most_s:
        raise Refusal(
            f"reading this body takes {seconds * 1000:.0f} ms of CPU time, and {most_s * 1000:.0f} ms are allowed: "
            "send fewer messages, parts or tools"
        )

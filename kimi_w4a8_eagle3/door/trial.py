"""Try a grammar in the door's workers (gateway/mask_walk.py)."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from ..gateway.mask_walk import MAX_GRAMMAR_BYTES, costliest_mask, resident_bytes
from .admission import Admission, WorkerJob
from .answers import Refusal
from .large import Encode, reading_job
from .pictures import picture_job
from .rules import RequestRules
from .shares import Shares

# SGLang's sampling parameters that hold a grammar, in its order, and its names for their kinds.
_KINDS = {"json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
CPU_S = 20.0  # to compile a grammar and to walk through it
_STEP_S = 6.0  # then the kernel ends a walk: a single mask of an ambiguous pattern can take minutes


# Compiles a grammar, given its kind and its text, as SGLang does. The result has `error_message` or `ctx`.
Compile = Callable[[str, str], Any]


def workers(
    prepare: Callable[[], Compile], max_mask_ms: float, rules: RequestRules, encode: Encode | None, shares: Shares
) -> Admission:
    """Return the door's workers, which try grammars, read large bodies, count their tokens and check pictures."""
    reading = reading_job(rules, encode)
    jobs = {"grammar": _grammar_job(prepare, max_mask_ms), "reading": reading, "pictures": picture_job()}
    return Admission(jobs, shares)


def _grammar_job(prepare: Callable[[], Compile], max_mask_ms: float) -> WorkerJob:
    why = "offer fewer alternatives and optional properties, and replace nested repeats and large counts in patterns"
    why = f"the grammar cannot be compiled within {CPU_S:.0f} s of CPU time and 1 GiB, or a token takes seconds: {why}"
    return WorkerJob(lambda: partial(_try, prepare(), max_mask_ms), CPU_S, why)


def grammars_of(sampling_params: Any) -> list[tuple[str, str]]:
    """Return the grammars in SGLang's sampling parameters, or in a list of them, each with its field."""
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    return [(name, one[name]) for one in params if one for name in _KINDS if one.get(name) is not None]


async def tried(
    admission: Admission, grammars: list[tuple[str, str]], answers: AsyncIterator[Any]
) -> AsyncIterator[Any]:
    """Yield the answers, after all grammars were admitted; SGLang answers 400 to a ValueError."""
    from fastapi import HTTPException  # start-up: only an engine needs it

    try:
        for name, text in grammars:
            await admission.require("grammar", (_KINDS[name], text), name)
    except Refusal as refusal:
        wrong = refusal.status == HTTPStatus.BAD_REQUEST
        raise (ValueError(refusal.message) if wrong else HTTPException(refusal.status, refusal.message)) from None
    async for answer in answers:
        yield answer


def _try(compile_: Compile, max_mask_ms: float, grammar_text: list[str]) -> None:
    kind, text = grammar_text
    before = resident_bytes()
    grammar = compile_(kind, text)
    if error := getattr(grammar, "error_message", None):
        raise Refusal(f"Failed to compile {kind} grammar: {error}")
    if grammar is None:
        return  # --grammar-backend none: SGLang refuses it
    if (size := resident_bytes() - before) > MAX_GRAMMAR_BYTES:
        raise Refusal(
            f"the compiled {kind} grammar takes {size / 2**20:.0f} MiB; {MAX_GRAMMAR_BYTES >> 20} MiB are allowed: "
            "offer fewer alternatives and optional properties"
        )
    left_s = signal.getitimer(signal.ITIMER_PROF)[0]  # of the worker's own limit
    signal.setitimer(signal.ITIMER_PROF, min(_STEP_S, left_s or _STEP_S))
    ms, before_it = costliest_mask(grammar.ctx, max_mask_ms)
    if ms > max_mask_ms:
        raise Refusal(
            f"this {kind} grammar is too slow: after {before_it!r} finding the tokens that may follow takes "
            f"{ms:.0f} ms, and {max_mask_ms:.0f} ms are allowed: remove repeats inside repeats, repeat large "
            "classes of characters fewer times, or offer fewer alternatives that begin alike"
        )

"""Trials of grammars and pictures in processes of their own, which are killed when they take too long.

What a client sends to be compiled or decoded never runs beside the event loop of other clients. pebble keeps the
processes, ends one at its time limit and starts another.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
from collections import OrderedDict
from concurrent.futures import TimeoutError as TrialTimeout
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from . import trial_process
from .conversation import Grammar
from .errors import Refusal

TRIAL_S = 60.0  # to compile a grammar and to walk through it, or to decode the pictures of a request
PROCESSES = 2
MAX_WAITING = 64
_KEPT = 4096  # verdicts on grammars


class Trials:
    """A pool of trial processes. checkpoint: the folder of the tokenizer. max_mask_ms: for one token's mask."""

    def __init__(self, checkpoint: Path, trusted: bool, vocabulary: int, max_mask_ms: float) -> None:
        self._new = partial(
            ProcessPool,
            max_workers=PROCESSES,
            max_tasks=256,
            initializer=trial_process.prepare,
            initargs=(str(checkpoint), trusted, vocabulary, max_mask_ms),
            context=multiprocessing.get_context("spawn"),
        )
        self._pool = self._new()
        self._verdicts: OrderedDict[bytes, Any] = OrderedDict()
        self._waiting = 0

    def warm(self) -> None:
        """Start a process, which takes seconds, before the first grammar comes."""
        self._pool.schedule(trial_process.ready, timeout=120)

    async def grammar(self, grammar: Grammar) -> Grammar:
        """Return the grammar as the engine gets it; raise Refusal for one that cannot be served."""
        name = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode(errors="surrogatepass")).digest()
        if name not in self._verdicts:
            why = "the grammar cannot be compiled in time: offer fewer alternatives and optional properties, and "
            why += "replace nested repeats and large counts in patterns"
            self._verdicts[name] = await self._try(
                partial(trial_process.try_grammar, grammar.kind, grammar.text), why, grammar.kind
            )
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[name]
        if isinstance(verdict, Refusal):
            raise Refusal(verdict.message, verdict.status, verdict.param)
        return Grammar(grammar.kind, verdict)

    async def pictures(self, urls: list[str]) -> list[tuple[int, int]]:
        """Return the sizes of pictures; raise Refusal for those that the engine should not decode."""
        why = "the pictures cannot be decoded in time: send fewer or smaller ones"
        verdict = await self._try(partial(trial_process.try_pictures, urls), why, "messages")
        if isinstance(verdict, Refusal):
            raise verdict
        sizes: list[tuple[int, int]] = verdict
        return sizes

    def close(self) -> None:
        """End all processes."""
        _end(self._pool)

    async def _try(self, work: partial[Any], why: str, param: str) -> Any:
        """Return the result of a trial, or the Refusal that it ended with."""
        if self._waiting >= MAX_WAITING:
            raise Refusal("too many grammars and pictures wait to be checked; try again", status=503)
        self._waiting += 1
        try:
            if not self._pool.active:  # pebble gives up a pool whose process was killed without a task
                broken, self._pool = self._pool, self._new()
                await asyncio.to_thread(_end, broken)
            future = self._pool.schedule(work.func, args=work.args, timeout=TRIAL_S)
            return await asyncio.wrap_future(future)
        except trial_process.Refused as error:
            return Refusal(str(error), param=param)
        except (TrialTimeout, asyncio.TimeoutError, ProcessExpired, BrokenProcessPool, MemoryError):
            return Refusal(why, param=param)
        finally:
            self._waiting -= 1


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join(timeout=10)

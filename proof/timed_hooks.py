"""Runs a program of SGLang with a clock around each hook of the plugin, for `python -m proof.hook_costs`.

A hook around a function counts neither that function nor the clock. Each verify step is a line of the file that
HOOK_COSTS names: the requests of its batch, and the nanoseconds of each hook since the verify step before. In every
second step SGLang's own pass over the logits takes the place of the plugin's.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns
from timeit import repeat
from typing import Any

from kimi_w4a8_eagle3.sglang_plugin import hooks
from kimi_w4a8_eagle3.sglang_plugin.run_module import run

STEP = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
REPLACED = "sglang.srt.utils.async_probe.sanitize_nan_logits"
OWN = "SGLang's own pass over the logits"
_spent: defaultdict[str, int] = defaultdict(int)
_clock_ns = [0]  # that the clock adds to a hook around a function


def timed(hook: hooks.Hook) -> hooks.Hook:
    """Return the hook with a clock around it."""
    function, around, turns = hook.function, hook.kind == "around", cycle((False, hook.target == REPLACED))
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @wraps(function)
    def measured(*args: Any, **named: Any) -> Any:
        inner = [0]
        call, place = (_call, OWN) if next(turns) else (function, name)
        if around and call is function:
            args = (_excluded(args[0], inner), *args[1:])
        began = perf_counter_ns()
        try:
            return call(*args, **named)
        finally:
            _spent[place] += perf_counter_ns() - began - inner[0] - around * _clock_ns[0]
            if hook.target == STEP:
                _end_step(len(args[1].reqs))

    return hook._replace(function=measured)


def _call(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return original(*args, **named)


def _calibrate() -> None:
    clocked = timed(hooks.Hook("", "around", _call)).function
    counted = []
    for _ in range(100):
        for _ in range(100):
            clocked(int)
        counted.append(_spent.popitem()[1] / 100)
    hooked, bare = (min(repeat(call, number=100, repeat=100)) * 1e7 for call in (lambda: _call(int), int))
    _clock_ns[0] = round(min(counted) - (hooked - bare))


def _excluded(original: Callable[..., Any], inner: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        began = perf_counter_ns()
        try:
            return original(*args, **named)
        finally:
            inner[0] += perf_counter_ns() - began

    return call


def _end_step(requests: int) -> None:
    with Path(os.environ["HOOK_COSTS"]).open("a") as file:
        file.write(json.dumps([requests, _spent]) + "\n")
    _spent.clear()


def register(registry: Any, features: Iterable[hooks.Feature]) -> None:
    """Register the features with timed hooks."""
    _calibrate()
    given = list(features)
    for feature in given:
        feature.hooks = [timed(hook) if _is_ours(hook) else hook for hook in feature.hooks]
    _register(registry, given)


def _is_ours(hook: hooks.Hook) -> bool:
    """True if the hook runs in a scheduler and belongs to the plugin, not to the CPU's."""
    function = hook.function
    waits = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return function.__module__.startswith("kimi_w4a8_eagle3.") and not waits


_register, hooks.register = hooks.register, register

if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])

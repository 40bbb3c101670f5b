"""Runs a program of SGLang with one planted fault: the verify step accepts every draft token.

This is the mistake that a lossless check exists for: fast, fluent and wrong.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from kimi_w4a8_eagle3.sglang_plugin.cpu import draft_chain
from kimi_w4a8_eagle3.sglang_plugin.run_module import run

_verify = draft_chain.verify_tree_greedy_cpu


def accept_everything(*args: Any, **named: Any) -> None:
    """The CPU verify operator, told that the target would have chosen exactly what the draft proposed."""
    call = inspect.signature(_verify).bind(*args, **named)
    candidates = call.arguments["candidates"]
    agreeing = call.arguments["target_predict"].reshape(candidates.shape).clone()
    agreeing[:, :-1] = candidates[:, 1:]
    call.arguments["target_predict"] = agreeing
    _verify(*call.args, **call.kwargs)


if __name__ == "__main__":
    # SGLang took it by `from sgl_kernel import`; the scheduler is a fork of this process.
    for module in list(sys.modules.values()):
        for name in [name for name, held in getattr(module, "__dict__", {}).items() if held is _verify]:
            setattr(module, name, accept_everything)
    run(sys.argv[1:])

"""Runs SGLang like `run_module`, with one planted fault: the verify step accepts every draft token.

This is the mistake that a lossless check exists for: fast, fluent and wrong.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from kimi_w4a8_eagle3.sglang_plugin import cpu
from kimi_w4a8_eagle3.sglang_plugin.cpu import draft_chain

_verify = draft_chain.verify_tree_greedy_cpu


def accept_everything(*args: Any, **named: Any) -> None:
    """The CPU verify operator, told that the target would have chosen exactly what the draft proposed."""
    call = inspect.signature(_verify).bind(*args, **named)
    candidates = call.arguments["candidates"]
    agreeing = call.arguments["target_predict"].reshape(candidates.shape).clone()
    agreeing[:, :-1] = candidates[:, 1:]
    call.arguments["target_predict"] = agreeing
    _verify(*call.args, **call.kwargs)


# At import, because every spawned process of the server imports this module again before it does anything.
cpu.install()
setattr(sys.modules["sgl_kernel"], "verify_tree_greedy_cpu", accept_everything)  # noqa: B010

if __name__ == "__main__":
    import runpy

    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=False)

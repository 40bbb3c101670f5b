"""Bound the compiled grammars that are kept, and the number of threads that compile them.

SGLang and xgrammar's compiler keep every compiled grammar forever, so a client that sends a new schema or pattern with
each request would fill the memory of every scheduler. A grammar takes 32 MiB at most (`gateway/trial_process.py`), an
ordinary one less than 1 MB. Few are compiled at a time, because few processes of the gateway try them first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject

_COMPILER = "xgrammar.compiler.GrammarCompiler"
_BACKEND = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
FEATURE = Feature(
    "the bound of compiled grammars",
    remove_when="SGLang limits the grammars it keeps and compiles",
    # SGLang compiles grammars in threads. It polls them this often, every 5 ms or once per step, before it gives up.
    environ={"SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": "2000"},
)

MAX_GRAMMARS = 64
MAX_COMPILER_BYTES = 256 * 2**20
_TIMED_OUT = "Grammar preprocessing timed out"


@FEATURE.after(f"{_BACKEND}.set_cache")
def forget_oldest(_: None, backend: BaseGrammarBackend, key: tuple[str, str], value: BaseGrammarObject) -> None:
    """Forget the oldest, because every rank must forget the same one or a rank waits.

    A grammar that timed out while others were compiled is not wrong and may be sent again.
    """
    if getattr(value, "error_message", None) == _TIMED_OUT:
        del backend.cache[key]
    while len(backend.cache) > MAX_GRAMMARS:
        del backend.cache[next(iter(backend.cache))]


@FEATURE.before(f"{_COMPILER}.__init__")
def bound_compiler(*args: object, **named: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Limit the compiler's cache, and its threads, of which more than eight gain nothing, where SGLang does not."""
    threads = max(1, min(8, len(os.sched_getaffinity(0)) // 8))
    return args, {"cache_limit_bytes": MAX_COMPILER_BYTES, "max_threads": threads, **named}

"""Bounds on the grammars that are kept compiled: SGLang keeps each one for ever, and so does xgrammar's compiler.

Clients write schemas and patterns, so without a bound whoever sends a new one with each request takes the memory of
every scheduler. The dearest that the door lets in takes about 14 MB, an ordinary one less than 1 MB (docs/door.md).
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache"
COMPILER = "xgrammar.compiler.GrammarCompiler.__init__"

MAX_GRAMMARS = 128
_MAX_COMPILER_BYTES = 256 * 2**20


def forget_oldest(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """AFTER hook of `TARGET`. By age and not by use: every rank must forget the same, or one waits for the others."""
    while len(backend.cache) > MAX_GRAMMARS:
        del backend.cache[next(iter(backend.cache))]


def bound_compiler(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of `COMPILER`: a limit, where SGLang gives none, on what the compiler keeps for itself."""
    return args, {"cache_limit_bytes": _MAX_COMPILER_BYTES, **named}

"""Bound the compiled grammars that are kept, the white space they allow, and the number of threads that compile them.

SGLang and xgrammar's compiler keep every compiled grammar forever, so a client that sends a new schema or pattern with
each request would fill the memory of every scheduler. A grammar takes 32 MiB at most (`door/trial.py`), an ordinary one
less than 1 MB. Few are compiled at a time, because few workers of the door try them first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ...door.admission import cores, threads_of
from ...gateway.tags import compact
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject

_COMPILER = "xgrammar.compiler.GrammarCompiler"
_BACKEND = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
FEATURE = Feature("the bound of compiled grammars", remove_when="SGLang limits the grammars it keeps and compiles")

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
    """Limit the compiler's cache and its threads where SGLang sets no limit."""
    return args, {"cache_limit_bytes": MAX_COMPILER_BYTES, "max_threads": threads_of(cores()), **named}


@FEATURE.before(f"{_COMPILER}.compile_json_schema")
def write_compactly(*args: object, **named: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Allow no white space between JSON's parts but `, ` and `: `: models fill their limit with it."""
    return args, {**named, "any_whitespace": False}


@FEATURE.before(f"{_COMPILER}.compile_structural_tag")
def write_calls_compactly(compiler: object, tag: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Do the same for the arguments of calls, for which xgrammar has no such switch."""
    from xgrammar import Grammar  # start-up: only schedulers compile

    def grammar_of(schema: object) -> str:
        return str(Grammar.from_json_schema(json.dumps(schema), any_whitespace=False))

    return (compiler, json.dumps(compact(json.loads(tag), grammar_of)) if isinstance(tag, str) else tag), {}

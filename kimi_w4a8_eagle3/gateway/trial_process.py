"""What runs in a trial process: grammars are compiled and walked through, pictures are decoded."""

from __future__ import annotations

import json
import os
import resource
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Refusal
from .mask_walk import MAX_GRAMMAR_BYTES, costliest_mask, resident_bytes
from .pictures import check_pictures
from .tags import compact

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

_MEMORY = 4 * 2**30  # of a process beyond what its imports take

_prepared: tuple[str, bool, int, float] = ("", False, 0, 0.0)


class Refused(Exception):
    """A grammar or a picture that must not reach the engine, with the reason."""


def prepare(checkpoint: str, trusted: bool, vocabulary: int, max_mask_ms: float) -> None:
    """Remember what grammars are compiled for; called once in each process."""
    global _prepared
    _prepared = (checkpoint, trusted, vocabulary, max_mask_ms)
    os.nice(5)  # where cores are few, the event loop and the schedulers go first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def ready() -> None:
    """Import and make what the first grammar would wait for."""
    _compiler()


@cache
def _compiler() -> GrammarCompiler:
    """Return xgrammar's compiler for the checkpoint's vocabulary, as SGLang makes it."""
    from transformers import AutoTokenizer  # heavy, as xgrammar, which imports torch
    from xgrammar import GrammarCompiler, TokenizerInfo

    _bound_memory(None)  # what pictures have bound is too little for the imports
    checkpoint, trusted, vocabulary, _ = _prepared
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trusted)
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary or None)
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def try_grammar(kind: str, text: str) -> str:
    """Return the text that the engine compiles; raise Refused where it would be wrong, too large or too slow."""
    compiler, before = _compiler(), resident_bytes()
    _bound_memory(_MEMORY)
    try:
        match kind:
            case "json_schema":
                grammar = compiler.compile_json_schema(text, any_whitespace=False)
            case "regex":
                grammar = compiler.compile_regex(text)
            case _:
                text = json.dumps(compact(json.loads(text), _grammar_of))
                grammar = compiler.compile_structural_tag(text)
    except (RuntimeError, ValueError, TypeError) as error:
        raise Refused(f"Failed to compile {kind} grammar: {str(error)[:500]}") from None
    if (size := resident_bytes() - before) > MAX_GRAMMAR_BYTES:
        raise Refused(
            f"the compiled {kind} grammar takes {size / 2**20:.0f} MiB; {MAX_GRAMMAR_BYTES >> 20} MiB are allowed: "
            "offer fewer alternatives and optional properties"
        )
    most_ms = _prepared[3]
    ms, before_it = costliest_mask(grammar, most_ms)
    if ms > most_ms:
        raise Refused(
            f"this {kind} grammar is too slow: after {before_it!r} finding the tokens that may follow takes "
            f"{ms:.0f} ms, and {most_ms:.0f} ms are allowed: remove repeats inside repeats, repeat large "
            "classes of characters fewer times, or offer fewer alternatives that begin alike"
        )
    return text


def _grammar_of(schema: object) -> str:
    from xgrammar import Grammar  # heavy, as above

    return str(Grammar.from_json_schema(json.dumps(schema), any_whitespace=False))


def _bound_memory(more: int | None) -> None:
    """Let this process map so many bytes beyond what it has, or as many as its parent may."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = most if more is None else pages * os.sysconf("SC_PAGE_SIZE") + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def try_pictures(urls: list[str]) -> list[tuple[int, int]]:
    """Decode all pictures as the engine will, and return their sizes; raise Refused for one that it should not."""
    _bound_memory(_MEMORY)
    try:
        return check_pictures(urls)
    except Refusal as refusal:
        raise Refused(refusal.message) from None

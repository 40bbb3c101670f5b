"""Bounds on SGLang's compiled grammars in both releases: how many are kept."""

from __future__ import annotations

from support.sglang_program import BOTH, found

KEPT = """
import json
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from xgrammar import TokenizerInfo, VocabType
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from kimi_w4a8_eagle3.sglang_plugin.upkeep.grammar_cache import MAX_GRAMMARS

class Tokenizer:
    def init_xgrammar(self):
        return TokenizerInfo([bytes([byte]) for byte in range(256)], VocabType.RAW, stop_token_ids=[0]), None

backend = XGrammarGrammarBackend(Tokenizer(), vocab_size=256)
keys = [("regex", f"a{{{number}}}") for number in range(1, MAX_GRAMMARS + 6)]
for key in keys:
    grammar, known = backend.get_cached_or_future_value(key, False)
    assert not known
    backend.set_cache(key, grammar.result().copy())
kept = [key in backend.cache for key in keys]
again = [backend.get_cached_or_future_value(key, False)[1] for key in (keys[0], keys[-1])]
backend.set_cache("late", InvalidGrammarObject("Grammar preprocessing timed out"))
backend.set_cache("wrong", InvalidGrammarObject("no such type"))
print(json.dumps({
    "timed_out": ["late" in backend.cache, "wrong" in backend.cache],
    "kept": kept,
    "most": MAX_GRAMMARS,
    "again": again,
    "compiler": backend.grammar_compiler.cache_limit_bytes,
}))
"""


@BOTH
def test_the_oldest_grammars_are_forgotten(newest: bool) -> None:
    answer = found(KEPT, newest)
    assert answer["kept"] == [False] * 5 + [True] * answer["most"]
    assert answer["again"] == [False, True]
    assert answer["compiler"] == 256 * 2**20  # -1 is SGLang's own, no limit
    assert answer["timed_out"] == [False, True]

"""Bounds on SGLang's grammar backend, with the plugin's hooks, in both releases."""

from __future__ import annotations

import os

from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.sglang_plugin import grammar_cache

KEPT = """
import json
import os
import threading
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from xgrammar import TokenizerInfo, VocabType
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from kimi_w4a8_eagle3.sglang_plugin.grammar_cache import MAX_GRAMMARS, at_a_time

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
gate = threading.Event()
at_once = [backend.executor.submit(gate.wait) for _ in range(50)]
print(json.dumps({
    "timed_out": ["late" in backend.cache, "wrong" in backend.cache],
    "at_a_time": at_a_time(len(os.sched_getaffinity(0))),
    "threads": sum(thread.name.startswith("grammar") for thread in threading.enumerate()),
    "kept": kept,
    "most": MAX_GRAMMARS,
    "again": again,
    "compiler": backend.grammar_compiler.cache_limit_bytes,
}))
gate.set()
"""


@BOTH
def test_the_oldest_grammars_are_forgotten_and_few_are_compiled_at_a_time(newest: bool) -> None:
    answer = found(KEPT, newest)
    assert answer["kept"] == [False] * 5 + [True] * answer["most"]
    assert answer["again"] == [False, True]
    assert answer["compiler"] == 256 * 2**20  # -1 is SGLang's own, no limit
    assert answer["threads"] == answer["at_a_time"]  # SGLang's own: the cores and four more
    assert answer["timed_out"] == [False, True]


def test_half_of_the_cores_are_left_to_others() -> None:
    cores = (1, 2, 4, 16, 32, 192)
    assert [(grammar_cache.at_a_time(count), grammar_cache.threads_of(count)) for count in cores] == [
        *[(2, 1)] * 3,
        (2, 2),
        (2, 4),
        (8, 8),
    ]
    assert grammar_cache.bound_compiler("info")[1]["max_threads"] == grammar_cache.threads_of(
        len(os.sched_getaffinity(0))
    )

"""Bounds on SGLang's compiled grammars in both releases: how many are kept, and their white space."""

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


COMPACT = """
import json
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import PreTrainedTokenizerFast
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo
from kimi_w4a8_laptop import tiny

tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny.target_path() / "tokenizer.json"))
compiler = GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[0]))
numbers = {"type": "array", "items": {"type": "integer"}}
schema = {"type": "object", "properties": {"q": {"type": "string"}, "n": numbers, "größe": {"enum": ["°C", "數e"]}}}
schema["required"] = list(schema["properties"])
tool = Tool(type="function", function={"name": "s", "parameters": schema, "strict": True})
_, tag = FunctionCallParser([tool], "kimi_k2").get_structure_constraint("required")
begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.s:0<|tool_call_argument_begin|>"
grammars = {
    "schema": (compiler.compile_json_schema(json.dumps(schema), any_whitespace=True), ""),
    "object": (compiler.compile_json_schema('{"type": "object"}'), ""),
    "call": (compiler.compile_structural_tag(tag.model_dump_json()), begin),
}
texts = {
    "compact": '{"q": " \\\\n", "n": [1, 2], "größe": "數e"}', "blank": '{ "q"', "line": '{\\n', "blanks": '{"q":  "',
    "comma": '{"q": "a" ,',
}
print(json.dumps({
    name: [what for what, text in texts.items() if GrammarMatcher(grammar).accept_string(start + text)]
    for name, (grammar, start) in grammars.items()
}))
"""


@BOTH
def test_json_has_one_form(newest: bool) -> None:
    assert found(COMPACT, newest) == {"schema": ["compact"], "object": ["compact"], "call": ["compact"]}

"""Compiled grammars allow no white space of the model's choice, in JSON and in the arguments of calls."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import json
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from tokenizers import Tokenizer
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
    assert found(PROGRAM, newest) == {"schema": ["compact"], "object": ["compact"], "call": ["compact"]}

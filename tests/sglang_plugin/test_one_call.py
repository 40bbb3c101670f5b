"""`parallel_tool_calls: false` is held by the grammar of SGLang's own constraint, for every choice of tools."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import json
from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}

def call(index, arguments='{"q": "a"}'):
    return f"<|tool_call_begin|>functions.s:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

answers = {
    "text": "Hi", "one": BEGIN + call(0) + END, "two": BEGIN + call(0) + call(1) + END,
    "two sections": (BEGIN + call(0) + END) * 2, "a list": BEGIN + call(0, "[1]") + END,
    "another schema": BEGIN + call(0, '{"z": 1}') + END,
}
choices = {"auto": "auto", "required": "required", "named": ToolChoice(type="function", function={"name": "s"})}
got = {}
for strict in (False, True):
    tools = [Tool(type="function", function={"name": "s", "parameters": schema, "strict": strict})]
    for name, choice in choices.items():
        for parallel in (True, False):
            found = FunctionCallParser(tools, "kimi_k2").get_structure_constraint(choice, parallel_tool_calls=parallel)
            grammar = found and Grammar.from_structural_tag(found[1])
            allowed = [what for what, text in answers.items() if not grammar or accepts(grammar, text)]
            got[f"{name} {'strict ' * strict}{'parallel' if parallel else 'one'}"] = allowed
print(json.dumps(got))
"""


@BOTH
def test_a_request_for_one_call_gets_one(newest: bool) -> None:
    got = found(PROGRAM, newest)
    assert got["auto one"] == ["text", "one", "another schema"]
    assert got["auto strict one"] == ["text", "one"]
    assert got["required one"] == got["named one"] == ["one", "another schema"]
    assert got["required strict one"] == got["named strict one"] == ["one"]
    assert len(got["auto parallel"]) == 6  # without a grammar
    assert got["auto strict parallel"] == ["text", "one", "two", "two sections"]
    assert got["required strict parallel"] == ["one", "two"]

"""Grammars allow one call where the request allows one, and no end before thinking has ended."""

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

from kimi_w4a8_laptop import tiny
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(tiny.target_path())
inner = XGrammarGrammarBackend(tokenizer, vocab_size=len(tokenizer), model_eos_token_ids=[tokenizer.eos_token_id])

def forbidden(grammar):
    mask = grammar.allocate_vocab_mask(len(tokenizer), 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    allowed = [int(mask[0, token // 32]) >> token % 32 & 1 for token in range(len(tokenizer))]
    return [tokenizer.decode([token]) for token, bit in enumerate(allowed) if not bit]

for parser in ("kimi_k2", "deepseek-r1"):
    backend = ReasonerGrammarBackend(inner, ReasoningParser(parser), tokenizer)
    grammar = backend._init_value_dispatch(("regex", "a+"), True).copy()
    got[parser] = [forbidden(grammar), backend.init_strict_reasoning_grammar(True)]
    grammar.accept_token(tokenizer.convert_tokens_to_ids("</think>"))
    got[parser].append(["a" in forbidden(grammar), "b" in forbidden(grammar)])
    grammar.rollback(1)
    got[parser].append(forbidden(grammar) == got[parser][0])
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


@BOTH
def test_an_answer_with_a_grammar_cannot_end_or_call_while_it_thinks(newest: bool) -> None:
    got = found(PROGRAM, newest)
    calls = ["section_begin", "section_end", "begin", "argument_begin", "end"]
    markers = [f"<|tool_call{'s' * name.startswith('section')}_{name}|>" for name in calls]
    assert got["kimi_k2"] == [["[EOS]", "<|im_end|>", *markers], None, [False, True], True]
    assert got["deepseek-r1"] == [[], None, [False, True], True]

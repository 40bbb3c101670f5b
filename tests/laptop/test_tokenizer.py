import pytest
from tokenizers import Tokenizer

from kimi_w4a8_eagle3.base.calculator import declaration
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_laptop import tiny, torchvision_ops
from kimi_w4a8_laptop.tiny.tokenizer import chat_text

TOKENIZER = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
IM_END_ID = 3  # eos_token_id of config.json


@pytest.fixture(scope="module")
def hf_tokenizer():
    torchvision_ops.declare_missing()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.target_path())


def test_transformers_reads_the_same_tokenizer(hf_tokenizer):
    for problem in problems(50):
        text = chat_text(problem.question) + problem.solution
        assert hf_tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert hf_tokenizer.eos_token_id == IM_END_ID
    ids = hf_tokenizer("a</think>b<|tool_calls_section_begin|>c<|im_end|>")["input_ids"]
    # What SGLang's parsers look for stays in the text; the end of the turn does not.
    assert hf_tokenizer.decode(ids, skip_special_tokens=True) == "a</think>b<|tool_calls_section_begin|>c"


@pytest.fixture
def rendered(hf_tokenizer):
    def rendered(messages, **more):
        return hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)

    return rendered


def test_a_question_opens_the_thinking_and_thinking_can_be_closed(rendered):
    user = {"role": "user", "content": "How many?"}
    asked = "<|im_user|>user<|im_middle|>How many?<|im_end|>"
    assert rendered([user]) == chat_text("How many?") == asked + "<|im_assistant|>assistant<|im_middle|><think>"
    assert rendered([user], thinking=False) == chat_text("How many?") + "</think>"
    assert rendered([{"role": "system", "content": "Be brief."}, user]) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>" + chat_text("How many?")
    )
    parts = {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]}
    assert rendered([parts]) == chat_text("How many?")
    said = {"role": "assistant", "reasoning_content": "Hm.", "content": "#### 3"}  # thinking is not shown again
    assert rendered([user, said, user]) == (
        asked + "<|im_assistant|>assistant<|im_middle|><think></think>#### 3<|im_end|>" + chat_text("How many?")
    )


def test_tools_their_calls_and_results_are_written_as_kimi_writes_them(rendered):
    call = {"id": "functions.calculator:0", "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "3 + 4"}'}}  # fmt: skip
    conversation = [
        {"role": "user", "content": "3 + 4"},
        {"role": "assistant", "reasoning_content": "I need 3 + 4.", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.calculator:0", "content": "7"},
    ]
    parameters = '{"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}'
    assert rendered(conversation, tools=[declaration()]) == (
        '<|im_system|>tool_declare<|im_middle|>{"name": "calculator", "description": "Works out one operation.", '
        f'"parameters": {parameters}}}<|im_end|>'
        "<|im_user|>user<|im_middle|>3 + 4<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>I need 3 + 4.</think><|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        '{"expression": "3 + 4"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.calculator:0\n7<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )

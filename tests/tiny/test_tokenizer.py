import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3 import tiny
from kimi_w4a8_eagle3.tiny.tokenizer import chat_text
from proof.tiny.build import CORPUS_DOCUMENTS, CORPUS_SEED
from proof.tiny.data import corpus
from proof.tiny.tokenizer import (
    CHAT_TEMPLATE,
    IM_END_ID,
    SPECIAL_TOKENS,
    load_tokenizer,
    train_tokenizer,
)

TOKENIZER = load_tokenizer(tiny.target_path())


@given(st.text())
def test_any_text_survives_a_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_all_bytes_are_known():
    text = bytes(range(256)).decode("latin-1") + "漢字 🙂 naïve\r\n\t"
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@given(st.integers(0, 10**12))
def test_every_digit_is_a_token(number):
    tokens = TOKENIZER.encode(f"has {number} apples").tokens
    assert [t for t in tokens if t.isdigit()] == list(str(number))


def test_special_tokens_come_first():
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert TOKENIZER.encode("<|im_end|>").ids == [IM_END_ID]


def test_committed_tokenizer_is_what_the_corpus_yields():
    again = train_tokenizer(corpus(CORPUS_DOCUMENTS, CORPUS_SEED), TOKENIZER.get_vocab_size())
    assert json.loads(again.to_str()) == json.loads(TOKENIZER.to_str())


@pytest.fixture(scope="module")
def hf_tokenizer():
    from kimi_w4a8_eagle3.base import torchvision_ops

    torchvision_ops.declare_missing()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.target_path())


def test_transformers_reads_the_same_tokenizer(hf_tokenizer):
    for problem in tiny.problems("held_out", 50):
        text = chat_text(problem.question) + problem.solution
        assert hf_tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert hf_tokenizer.eos_token_id == IM_END_ID
    assert hf_tokenizer.decode([IM_END_ID], skip_special_tokens=True) == ""


def test_chat_template_writes_what_the_model_was_trained_on(hf_tokenizer):
    def rendered(messages):
        return hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    user = {"role": "user", "content": "How many?"}
    assert rendered([user]) == chat_text("How many?")
    assert rendered([{"role": "system", "content": "Be brief."}, user]) == chat_text("How many?", "Be brief.")
    parts = {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]}
    assert rendered([parts]) == chat_text("How many?")
    turns = rendered([user, {"role": "assistant", "content": "#### 3"}, user])
    assert turns == chat_text("How many?") + "#### 3<|im_end|>" + chat_text("How many?")
    assert hf_tokenizer.chat_template == CHAT_TEMPLATE

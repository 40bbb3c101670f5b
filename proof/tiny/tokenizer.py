"""The built-in model's tokenizer: byte-level BPE over the word problems, every digit a token of its own.

All 256 bytes are in the vocabulary, so any UTF-8 text survives encode and decode unchanged; what was not seen in the
corpus only takes more tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kimi_w4a8_laptop.tiny.tokenizer import (  # fmt: skip
    CALL_ARGUMENTS,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    THINK_BEGIN,
    THINK_END,
)

PAD, BOS, EOS = "[PAD]", "[BOS]", "[EOS]"
SPECIAL_TOKENS = [
    PAD, BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE,
    THINK_BEGIN, THINK_END, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_ARGUMENTS, CALL_END,
    MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END,
]  # fmt: skip
PAD_ID, BOS_ID, EOS_ID, IM_END_ID = range(4)
# What SGLang's parsers of thinking and calls look for in the text: "special" tokens are left out of it.
TEXT_TOKENS = {
    THINK_BEGIN, THINK_END, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_ARGUMENTS, CALL_END,
}  # fmt: skip
MEDIA_PAD_ID = SPECIAL_TOKENS.index(MEDIA_PAD)

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content or [] -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type in ['image', 'image_url'] -%}
<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{{- '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(first=0) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and not message.tool_calls -%}{%- set turn.first = loop.index -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>
{%- for tool in tools -%}
{%- set function = tool.function -%}
{{- {'name': function.name, 'description': function.description, 'parameters': function.parameters} | tojson -}}
{{- '\\n' if not loop.last -}}
{%- endfor -%}
<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- set name = message.name or message.role -%}
<|im_{{ message.role if message.role in ['user', 'assistant'] else 'system' }}|>{{ name }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{{- message.reasoning_content if loop.index0 >= turn.first and message.reasoning_content -}}</think>
{%- elif message.role == 'tool' -%}
## Return of {{ message.tool_call_id }}{{- '\\n' -}}
{%- endif -%}
{{- text_of(message.content) -}}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{{- '</think>' if thinking is defined and not thinking -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from `texts`; the result has exactly `vocab_size` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: give more text")
    learned = json.loads(tokenizer.to_str())
    for token in learned["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS  # the trainer makes all of them special
    return Tokenizer.from_str(json.dumps(learned))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and special_tokens_map.json."""
    special: dict[str, Any] = {"bos_token": BOS, "eos_token": IM_END, "pad_token": PAD}
    config = {
        **special,
        "added_tokens_decoder": {
            str(index): {"content": token, "special": token not in TEXT_TOKENS, "normalized": False, "lstrip": False,
                         "rstrip": False, "single_word": False}
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": [
            token for token in SPECIAL_TOKENS if token not in {PAD, BOS, IM_END, *TEXT_TOKENS}
        ],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json back, without transformers."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))

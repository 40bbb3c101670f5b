"""The built-in model's tokenizer: byte-level BPE over the word problems, every digit a token of its own.

All 256 bytes are in the vocabulary, so any UTF-8 text survives encode and decode unchanged; what was not seen in the
corpus only takes more tokens. The chat markers carry the names that Kimi uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BOS, EOS = "[PAD]", "[BOS]", "[EOS]"
IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE = (
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
)  # fmt: skip
SPECIAL_TOKENS = [PAD, BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE]
PAD_ID, BOS_ID, EOS_ID, IM_END_ID = range(4)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set text = message.content -%}
{%- else -%}{%- set text = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- endif -%}
<|im_{{ message.role if message.role in ['user', 'assistant'] else 'system' }}|>{{ message.role }}<|im_middle|>\
{{- text -}}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def chat_text(question: str, system: str | None = None) -> str:
    """What the chat template makes of one user turn, up to where the assistant begins to write."""
    head = f"{IM_SYSTEM}system{IM_MIDDLE}{system}{IM_END}" if system else ""
    return f"{head}{IM_USER}user{IM_MIDDLE}{question}{IM_END}{IM_ASSISTANT}assistant{IM_MIDDLE}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from `texts`; the result has exactly `vocab_size` entries."""
    # start-up: tokenizers, which `kimi demo` does without
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?\p{L}+|\s+|[^\s\p{L}\d]+"), behavior="isolated"),
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
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and special_tokens_map.json."""
    special: dict[str, Any] = {"bos_token": BOS, "eos_token": IM_END, "pad_token": PAD}
    config = {
        **special,
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                         "single_word": False}
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": SPECIAL_TOKENS[2:3] + SPECIAL_TOKENS[4:],
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
    from tokenizers import Tokenizer  # start-up: tokenizers, which `kimi demo` does without

    return Tokenizer.from_file(str(folder / "tokenizer.json"))

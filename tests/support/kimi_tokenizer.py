"""A checkpoint whose tokenizer is Python of its own, as Kimi-K2.5's: tiktoken over bytes, tools declared in TypeScript.

Its facts are those of Kimi's: `encode` takes every marker in a text as a control token unless it is told otherwise and
takes no keyword of transformers without a detour, reserved tokens have no added token, `apply_chat_template` sorts the
tools and declares them itself, the generation prompt opens thinking, and old turns keep an empty `<think></think>`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

SPECIAL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip
ORDINARY = (
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
RESERVED = "<|reserved_token_300|>"
TEMPLATE = (
    """
{%- macro content(value) -%}
{%- if value is string -%}{{ value }}{%- else -%}
{%- for part in value or [] -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(at=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and not message.tool_calls -%}{%- set last.at = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools_ts_str -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- set kind = message.role if message.role in ('user', 'assistant') else 'system' -%}
<|im_{{ kind }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{%- if preserve_thinking or loop.index0 > last.at -%}{{ message.reasoning_content or '' }}{%- endif -%}</think>
{%- endif -%}
{%- if message.role == 'tool' -%}## Return of {{ message.tool_call_id }}\n{%- endif -%}
{{ content(message.content) }}
{%- if message.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}
<|im_end|>
{%- endfor -%}
<|im_assistant|>assistant<|im_middle|><think>{%- if thinking is defined and not thinking -%}</think>{%- endif -%}
""".replace("\n{%", "{%")
    .replace("-%}\n", "-%}")
    .strip()
)
CODE = """
import base64
import json
import tiktoken
from transformers import PreTrainedTokenizer


def ordered(value):
    if isinstance(value, dict):
        return {name: ordered(inner) for name, inner in sorted(value.items())}
    return [ordered(inner) for inner in value] if isinstance(value, list) else value


def declared(tools):
    lines = []
    for tool in tools:
        function = tool["function"]
        fields = (function.get("parameters") or {}).get("properties") or {}
        lines += [f"// {function.get('description') or ''}", f"type {function['name']} = (_: {{"]
        lines += [f"  {name}?: {inner.get('type', 'any')}," for name, inner in fields.items()] + ["}) => any;"]
    return "# Tools\\n\\nnamespace functions {\\n" + "\\n".join(lines) + "\\n}\\n"


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "ranks.json"}
    model_input_names = ["input_ids"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **named):
        ranks = {base64.b64decode(key): rank for key, rank in json.load(open(vocab_file)).items()}
        names = {at: token.content for at, token in (added_tokens_decoder or {}).items()}
        self.special_tokens = {names.get(at, f"<|reserved_token_{at}|>"): at for at in range(256, 320)}
        words = r"\\w+|\\W"
        self.model = tiktoken.Encoding(
            "own", pat_str=words, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        super().__init__(added_tokens_decoder=added_tokens_decoder, **named)

    def encode(self, text, allow_special_tokens=True, **named):
        if named:
            raise AssertionError("the slow path of transformers")
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def decode(self, ids, **named):
        return self.model.decode([ids] if isinstance(ids, int) else list(ids))

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {**{str(at): at for at in range(256)}, **self.special_tokens}

    def _tokenize(self, text, **named):
        return [str(token) for token in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.special_tokens.get(token, 0)

    def _convert_id_to_token(self, index):
        return str(index)

    def apply_chat_template(self, conversation, tools=None, tokenize=False, add_generation_prompt=True, thinking=True,
                            preserve_thinking=False, **named):
        tools = ordered(tools)
        if tools:
            named["tools_ts_str"] = declared(tools)
        return super().apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt,
            thinking=thinking, preserve_thinking=preserve_thinking, **named)
"""


def write_checkpoint(folder: Path) -> Path:
    """Write the tokenizer's files into a folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {base64.b64encode(bytes([byte])).decode(): byte for byte in range(256)}
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "tokenization_own.py").write_text(CODE)
    decoder = {
        str(256 + at): {"content": token, "special": token in SPECIAL, "normalized": False, "lstrip": False,
                        "rstrip": False, "single_word": False}
        for at, token in enumerate((*SPECIAL, *ORDINARY))
    }  # fmt: skip
    config = {
        "tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "unk_token": "[UNK]", "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

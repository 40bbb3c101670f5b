"""The prompt of a conversation: the checkpoint's own chat template, and token ids in which a client's text stays text.

The tokenizer of Kimi-K2.5 is Python of the checkpoint: its `apply_chat_template` declares tools in TypeScript, which no
jinja file does. It reads every marker in a text as a control token, so a tool's result could forge a system turn. Here
control tokens that a client spells are cut in two before the text is tokenized.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .conversation import Conversation, Message, Picture, Tool, number_calls
from .errors import Refusal

THINK, ANSWER = "<think>", "</think>"
_NAMED = re.compile(r"<\|[^|<>]{1,64}\|>")
_MARKS = (
    "\ue000",
    "\ue001",
    "\uf8ff",
    "\U000f0000",
    "\U0010fffd",
)  # of private use: one that no text holds cuts tokens


@dataclass(slots=True)
class Prompt:
    """ids: tokens, with one pad a picture. thinking: the prompt has opened thinking. tokens: as the engine counts."""

    ids: list[int]
    pictures: list[str]
    thinking: bool
    tokens: int


class Renderer:
    """Renders conversations with the tokenizer of a checkpoint. vocabulary: the number of its token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)  # counted once: it takes the tokenizer 0.2 ms
        # Kimi's tokenizer has a table of its own, with reserved tokens that nothing else names.
        self._control = {*tokenizer.get_added_vocab(), *getattr(tokenizer, "special_tokens", ())}
        self._unnamed = [token for token in self._control if not _NAMED.fullmatch(token)]
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
        # Kimi's `encode` takes a slow path where it gets any argument.
        self._plain = {} if not ends & set(tokenizer.encode("a")) else {"add_special_tokens": False}

    @classmethod
    def load(cls, checkpoint: Path, trusted: bool) -> Renderer:
        """Load the tokenizer of a checkpoint. trusted: Python files of the checkpoint may run."""
        # transformers imports torch where it finds it, which costs 17 s and 300 MB and is used for models alone
        blocked = "torch" not in sys.modules
        if blocked:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            from transformers import AutoTokenizer  # heavy: only a process that renders

            return cls(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trusted))
        finally:
            if blocked:
                del sys.modules["torch"]

    def render(self, conversation: Conversation) -> Prompt:
        """Return the prompt of a conversation; raise Refusal for one that the template does not take."""
        messages, prefix = list(conversation.messages), ""
        if not messages:
            raise Refusal("the request holds no message to answer: add one with a role and a text", param="messages")
        if conversation.continued:
            prefix = str(messages.pop().content)
        turns = [_turn(message) for message in number_calls(messages)]
        tools = [_declaration(tool) for tool in conversation.callable_tools] or None
        mark, (turns, tools, prefix) = self._cut((turns, tools, prefix))
        switches: dict[str, Any] = {"thinking": conversation.thinking, "enable_thinking": conversation.thinking}
        switches |= {"reasoning_effort": conversation.effort} if conversation.effort else {}
        try:
            text = self._tokenizer.apply_chat_template(
                turns,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                return_dict=False,
                **{**switches, **conversation.template},
            )
        except Exception as error:  # a template raises errors of its own, and TypeErrors of jinja
            raise Refusal(f"the chat template does not take these messages: {error}", param="messages") from None
        ids = self._encode(text, mark) + self._encode(prefix, mark)  # apart, as SGLang joins them
        pictures = [url for message in messages for url in message.pictures]
        return Prompt(ids, pictures, not prefix and text.endswith(THINK), len(ids))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text. special: control tokens in it are such."""
        if special:
            return list(self._tokenizer.encode(text, **self._plain))
        mark, text = self._cut(text)
        return self._encode(text, mark)

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special) if skip_special else self._decode(ids))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; a part of a character has no text of its own."""
        if single := getattr(getattr(self._tokenizer, "model", None), "decode_single_token_bytes", None):
            return bytes(single(token))  # of tiktoken
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        if written in self._control:
            return written.encode()
        return bytes(_byte_of()[character] for character in written)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _encode(self, text: str, mark: str) -> list[int]:
        pieces = text.split(mark) if mark else [text]
        return [token for piece in pieces if piece for token in self._tokenizer.encode(piece, **self._plain)]

    def _cut(self, given: Any) -> tuple[str, Any]:
        """Return a mark, and the values with the mark inside of every control token that they spell.

        The mark is empty where nothing was cut: the tokens of an ordinary conversation are the template's own.
        """
        texts = list(_texts(given))
        spelled = {token for text in texts for token in self._spelled(text)}
        if not spelled:
            return "", given
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise Refusal("the text holds control tokens beside all characters of private use that could part them")
        return mark, _replaced(given, {token: token[:2] + mark + token[2:] for token in spelled})

    def _spelled(self, text: str) -> Iterator[str]:
        yield from (token for token in _NAMED.findall(text) if token in self._control)
        yield from (token for token in self._unnamed if token in text)


def _turn(message: Message) -> dict[str, Any]:
    """Return a message as the template reads it, with the forms that SGLang's chat endpoint gives it."""
    turn: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name:
        turn["name"] = message.name
    if message.thinking:
        turn["reasoning_content"] = message.thinking
    if message.calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role == "tool":
        turn["tool_call_id"] = message.call_id
    return turn


def _content(message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    texts = [part for part in message.content if not isinstance(part, Picture)]
    if message.role == "tool" and len(texts) == len(message.content):
        return " ".join(part.text for part in texts)
    return [
        {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part.text}
        for part in message.content
    ]


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments as an object; broken ones stay as the model wrote them."""
    try:
        read = json.loads(text)
    except ValueError:
        return text
    return read if isinstance(read, dict) else text


def _declaration(tool: Tool) -> dict[str, Any]:
    function = {
        "description": tool.description, "name": tool.name, "parameters": tool.parameters, "strict": tool.strict,
    }  # fmt: skip
    return {"type": "function", "function": function}


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, names included."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            waiting += [*inner.keys(), *inner.values()]
        elif isinstance(inner, (list, tuple)):
            waiting += inner


def _replaced(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {_replaced(name, texts): _replaced(inner, texts) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(inner, texts) for inner in value)
    return value


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte of each character in which byte-level tokenizers write their tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}

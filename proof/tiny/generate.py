"""Greedy decoding of many prompts at once, and whole conversations in which the calculator answers the calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kimi_w4a8_eagle3.chat.calculator import calculate
from kimi_w4a8_laptop.tiny.tokenizer import CALL_ARGUMENTS, CALL_BEGIN, CALL_END, CALLS_BEGIN, IM_END, THINK_END

from .dialogues import Dialogue, Message, render
from .model import Cache, TargetModel
from .tokenizer import IM_END_ID, PAD_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 192
MAX_TURNS = 8  # six operations one after the other, and the answer
_CALL = re.compile(f"{re.escape(CALL_BEGIN)}(.*?){re.escape(CALL_ARGUMENTS)}(.*?){re.escape(CALL_END)}", re.DOTALL)


@torch.no_grad()
def greedy(
    model: TargetModel, prompts: Sequence[Sequence[int]], max_new_tokens: int = MAX_NEW_TOKENS
) -> list[list[int]]:
    """Greedy continuations, each up to and with <|im_end|>. The prompts are padded on the left to one length."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD_ID] * (width - len(p)) + list(p) for p in prompts])
    padding = torch.tensor([width - len(p) for p in prompts]).unsqueeze(1)
    cache, running = Cache(width + max_new_tokens), torch.arange(len(prompts))
    out: list[list[int]] = [[] for _ in prompts]
    start = 0
    while start < width + max_new_tokens - 1 and len(running):
        columns = torch.arange(start + tokens.shape[1])
        queries = columns[start:]
        mask = (columns <= queries[:, None]) & (columns >= padding[:, None])  # [B, T, S]
        mask = mask | (columns == queries[:, None])  # a padding row attends to itself, so that it stays finite
        logits, _ = model(tokens, (queries - padding).clamp_min(0), mask.unsqueeze(1), cache)
        start += tokens.shape[1]
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        for row, token in zip(running.tolist(), tokens[:, 0].tolist(), strict=True):
            out[row].append(token)
        going = tokens[:, 0] != IM_END_ID
        if not going.all():
            running, tokens, padding = running[going], tokens[going], padding[going]
            cache.keep(going)
    return out


@dataclass(frozen=True)
class Exchange:
    """One turn of the target: token ids of prompt and reply, and how many of them are the prompt's."""

    tokens: list[int]
    prompt: int


@dataclass
class GeneratedDialogue:
    """A dialogue as the model had it: what was sent so far, its turns, and its last answer once it has given one."""

    asked: Dialogue
    messages: list[Message]
    exchanges: list[Exchange] = field(default_factory=list)
    answer: str | None = None

    @property
    def right(self) -> bool:
        """True if the answer is the right one: the number, or every key of the object."""
        return self.answer is not None and self.asked.accepts(self.answer)

    def prompt(self) -> str:
        """Return the text that the model reads next."""
        return render(self.messages, self.asked.tools, ask=True, thinking=self.asked.thinking)

    def hear(self, exchange: Exchange, text: str) -> None:
        """Take the model's turn; its calls are answered."""
        self.exchanges.append(exchange)
        thought, _, said = text.removesuffix(IM_END).rpartition(THINK_END)
        content, _, called = said.partition(CALLS_BEGIN)
        calls = []
        for name, arguments in _CALL.findall(called):
            function = name.removeprefix("functions.").rpartition(":")[0]
            calls.append({"id": name, "type": "function", "function": {"name": function, "arguments": arguments}})
        if not calls:
            self.answer = content
            return
        self.messages.append(
            {"role": "assistant", "reasoning_content": thought, "content": content, "tool_calls": calls}
        )
        for call in calls:
            result = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"]}
            self.messages.append({**result, "content": calculate(call["function"]["arguments"])})


def converse(
    model: TargetModel,
    tokenizer: Tokenizer,
    dialogues: Sequence[Dialogue],
    batch: int = 250,
    advance: Callable[[int], None] = lambda n: None,
) -> list[GeneratedDialogue]:
    """Every dialogue from its question to the model's answer. `advance` is told of finished ones."""
    every = [GeneratedDialogue(dialogue, dialogue.question()) for dialogue in dialogues]
    running = list(every)
    for _ in range(MAX_TURNS):
        prompts = [
            tokenizer.encode(render(c.messages, c.asked.tools, ask=True, thinking=c.asked.thinking)).ids
            for c in running
        ]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for begin in range(0, len(order), batch):
            part = order[begin : begin + batch]
            for i, reply in zip(part, greedy(model, [prompts[i] for i in part]), strict=True):
                text = tokenizer.decode(reply, skip_special_tokens=False)
                running[i].hear(Exchange(prompts[i] + reply, len(prompts[i])), text)
        going = [dialogue for dialogue in running if dialogue.answer is None]
        advance(len(running) - len(going))
        running = going
        if not running:
            break
    advance(len(running))
    return every

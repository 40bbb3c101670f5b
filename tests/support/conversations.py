"""Random conversations of an agent, as a client of each of the three chat APIs sends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from support.pictures import noise, picture

from kimi_w4a8_lab.accuracy.vendor_checks import JsonBody

_WORDS = ("a file", "größer", "<b>", "two\nlines", '{"x": 1}', "日本語", "  spaces  ", "\\n", "end.")
_PARAMETERS = {"type": "object", "properties": {"value": {}}}
_NAMES = ("read", "write_file", "search")


@dataclass(frozen=True)
class Call:
    """A call, and its result unless the client has none yet."""

    name: str
    arguments: JsonBody
    result: str
    failed: bool


@dataclass(frozen=True)
class Turn:
    """A message of the user (`calls` is None), or an answer with its calls."""

    text: str
    thinking: str = ""
    picture: str = ""  # a data URL
    calls: tuple[Call, ...] | None = None


def conversations(count: int, seed: int) -> Iterator[list[Turn]]:
    """Draw conversations of answered, cut and open tool loops, with failed tools and pictures; the user speaks first.

    The last turn is the user's, or an answer whose calls have results.
    """
    random = Random(seed)
    for _ in range(count):
        turns: list[Turn] = []
        for _ in range(random.randint(1, 3)):
            turns += [_question(random), *(_answer(random, random.randint(1, 3)) for _ in range(random.randint(0, 3)))]
            if turns[-1].calls is None or random.random() < 0.7:
                turns.append(_answer(random, 0))
        yield turns if turns[-1].calls else [*turns, _question(random)]


def chat(turns: list[Turn]) -> JsonBody:
    """Return the body for /v1/chat/completions."""
    messages: list[JsonBody] = []
    for at, turn in enumerate(turns):
        if turn.calls is None:
            shown = {"type": "image_url", "image_url": {"url": turn.picture}}
            text = {"type": "text", "text": turn.text}
            messages.append({"role": "user", "content": [text, shown] if turn.picture else turn.text})
            continue
        calls = [
            {"id": f"call_{at}_{number}", "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for number, call in enumerate(turn.calls)
        ]  # fmt: skip
        message = {"role": "assistant", "content": turn.text, "reasoning_content": turn.thinking, "tool_calls": calls}
        messages.append({name: value for name, value in message.items() if value or name == "content"})
        messages += [
            {"role": "tool", "tool_call_id": f"call_{at}_{number}", "content": "Error: " * call.failed + call.result}
            for number, call in enumerate(turn.calls)
        ]
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": _PARAMETERS}}
             for name in _NAMES]  # fmt: skip
    return {"messages": messages, "tools": tools, "max_tokens": 8}


def responses(turns: list[Turn]) -> JsonBody:
    """Return the body for /v1/responses."""
    items: list[JsonBody] = []
    for at, turn in enumerate(turns):
        if turn.calls is None:
            content = [{"type": "input_text", "text": turn.text}]
            shown = {"type": "input_image", "image_url": turn.picture, "detail": "auto"}
            items.append({"role": "user", "content": [*content, shown] if turn.picture else content})
            continue
        if turn.thinking:
            thinking = [{"type": "reasoning_text", "text": turn.thinking}]
            items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [], "content": thinking})
        if turn.text:
            said = [{"type": "output_text", "text": turn.text, "annotations": []}]
            items.append({"type": "message", "id": f"msg_{at}", "role": "assistant", "content": said})
        items += [
            {"type": "function_call", "call_id": f"call_{at}_{number}", "name": call.name,
             "arguments": json.dumps(call.arguments)}
            for number, call in enumerate(turn.calls)
        ]  # fmt: skip
        items += [
            {
                "type": "function_call_output",
                "call_id": f"call_{at}_{number}",
                "output": "Error: " * call.failed + call.result,
            }
            for number, call in enumerate(turn.calls)
        ]
    tools = [{"type": "function", "name": name, "description": "", "parameters": _PARAMETERS} for name in _NAMES]
    return {"input": items, "tools": tools, "max_output_tokens": 8}


def messages(turns: list[Turn]) -> JsonBody:
    """Return the body for /v1/messages."""
    said: list[JsonBody] = []
    for at, turn in enumerate(turns):
        if turn.calls is None:
            content: list[JsonBody] = [{"type": "text", "text": turn.text}]
            if turn.picture:
                data = turn.picture.partition(",")[2]
                source = {"type": "base64", "media_type": "image/png", "data": data}
                content.append({"type": "image", "source": source})
            if said and said[-1]["role"] == "user":  # after the results of calls
                said[-1]["content"] += content
            else:
                said.append({"role": "user", "content": content})
            continue
        blocks: list[JsonBody] = (
            [{"type": "thinking", "thinking": turn.thinking, "signature": "x"}] if turn.thinking else []
        )
        blocks += [{"type": "text", "text": turn.text}] if turn.text else []
        blocks += [
            {"type": "tool_use", "id": f"toolu_{at}_{number}", "name": call.name, "input": call.arguments}
            for number, call in enumerate(turn.calls)
        ]
        said.append({"role": "assistant", "content": blocks})
        if turn.calls:
            results = [
                {"type": "tool_result", "tool_use_id": f"toolu_{at}_{number}", "content": call.result,
                 "is_error": call.failed}
                for number, call in enumerate(turn.calls)
            ]  # fmt: skip
            said.append({"role": "user", "content": results})
    tools = [{"name": name, "description": "", "input_schema": _PARAMETERS} for name in _NAMES]
    return {"messages": said, "tools": tools, "max_tokens": 8}


FORMS = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


def _text(random: Random) -> str:
    return " ".join(random.choices(_WORDS, k=random.randint(1, 4)))


def _question(random: Random) -> Turn:
    return Turn(_text(random), picture=picture(noise(28, 28)) if random.random() < 0.2 else "")


def _answer(random: Random, calls: int) -> Turn:
    """Draw an answer. Without calls it may be cut while it thinks, and then it has no text."""
    thinking = _text(random) if random.random() < 0.8 else ""
    made = tuple(
        Call(random.choice(_NAMES), {"value": random.choice((1, 1.5, None, True, _text(random), [_text(random)]))},
             _text(random), random.random() < 0.2)
        for _ in range(calls)
    )  # fmt: skip
    has_text = random.random() < (0.5 if calls or thinking else 1)
    return Turn(_text(random) if has_text else "", thinking, calls=made)

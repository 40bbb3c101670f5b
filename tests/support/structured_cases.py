"""A question with a schema in one of four forms, with thinking or without; and what its answer must be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from tokenizers import Tokenizer

from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_laptop import tiny
from kimi_w4a8_laptop.tiny.tokenizer import CALL_ARGUMENTS, CALLS_END, THINK_END

from .structured_schemas import Schema, draw

FORMS = ("response_format", "required", "named", "auto")
_MAX_TOKENS = 128
_MARKERS = ("<think>", "</think>", "<|tool_call", "<|im_")  # which may be asked for in an answer of a schema


@dataclass(frozen=True)
class StructuredCase:
    """A request. schemas: by the name of the tool whose arguments they describe; "" for the answer itself."""

    index: int
    form: str
    thinking: bool
    body: dict[str, Any]
    schemas: dict[str, Schema]

    @property
    def name(self) -> str:
        """Name in a report."""
        return f"{self.form}{' after thinking' if self.thinking else ''}, case {self.index}"


@dataclass(frozen=True)
class StructuredAnswer:
    """Answer of a server. text: of a refusal. ids: of its tokens. status 0: nothing."""

    status: int
    text: str
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    ids: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """True if the model ended before the token limit."""
        return self.finish_reason != "length"


@lru_cache(maxsize=4)
def _towards_an_end(thinking: bool, calls: bool) -> dict[str, float]:
    """Biases against blanks, which a grammar lets run for ever, and for what ends a string, an id, a list, a thought.

    The built-in model knows none of these schemas: without, greedy, it filled 15 of 16 limits with blanks or zeros. Of
    its thoughts it is surer, and keeps the first.
    """
    tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
    bias = {}
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if text == THINK_END and thinking:
            bias[str(token)] = 10.0
        elif calls and text == CALL_ARGUMENTS:
            bias[str(token)] = 8.0 if thinking else 20.0
        elif (calls and text == CALLS_END) or text.strip()[:1] in ('"', "}", "]"):
            bias[str(token)] = 6.0 if thinking else 12.0
        elif text.isspace():
            bias[str(token)] = -10.0 if thinking else -100.0
    return bias


def cases(count: int, seed: int, model: str) -> list[StructuredCase]:
    """`count` cases: each form in turn, thinking in every other round. A function of the seed."""
    random = Random(f"structured-{seed}")
    questions = [problem.question for problem in problems(count, seed=seed)]
    return [_case(index, question, random, model) for index, question in enumerate(questions)]


def schema_body(model: str, question: str, schema: Schema, thinking: bool = False) -> dict[str, Any]:
    """A request for an answer of this schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return {**_body(model, question, thinking, calls=False), "response_format": wanted}


def tool_body(model: str, question: str, schema: Schema) -> dict[str, Any]:
    """A request for a call of a tool with these arguments."""
    return {**_body(model, question, False), "tools": [_tool("tool_0", schema)], "tool_choice": "required"}


def fault(case: StructuredCase, answer: StructuredAnswer) -> str | None:
    """Fault of an answer to a case, or None. If the token limit cut it, only its form is judged."""
    if answer.status != 200:
        return f"HTTP {answer.status}: {answer.text[:200]}"
    content = answer.message.get("content") or ""
    if case.form != "response_format" and (shown := [marker for marker in _MARKERS if marker in content]):
        return f"{shown[0]} in the content: {content[:200]!r}"
    if not answer.complete:
        return None
    calls = answer.message.get("tool_calls") or []
    if case.form == "response_format":
        return _violated(content, case.schemas[""])
    if case.form != "auto" and not calls:
        return f"no call, finish_reason {answer.finish_reason}: {content[:200]!r}"
    if calls and answer.finish_reason != "tool_calls":
        return f"a call and finish_reason {answer.finish_reason}"
    if case.form == "named" and len(calls) != 1:
        return f"{len(calls)} calls of a named tool"
    offered = [case.body["tool_choice"]["function"]["name"]] if case.form == "named" else list(case.schemas)
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in offered:
            return f"{name} is called, offered: {offered}"
        if wrong := _violated(arguments, case.schemas[name]):
            return wrong
    return None


def _case(index: int, question: str, random: Random, model: str) -> StructuredCase:
    form, thinking = FORMS[index % len(FORMS)], index // len(FORMS) % 2 == 1
    if form == "response_format":
        schema = draw(random)
        return StructuredCase(index, form, thinking, schema_body(model, question, schema, thinking), {"": schema})
    schemas = {f"tool_{number}": draw(random) for number in range(random.randint(1, 2))}
    choice = {"type": "function", "function": {"name": random.choice(list(schemas))}} if form == "named" else form
    tools = [_tool(name, schema) for name, schema in schemas.items()]
    return StructuredCase(
        index, form, thinking, {**_body(model, question, thinking), "tools": tools, "tool_choice": choice}, schemas
    )


def _body(model: str, question: str, thinking: bool, calls: bool = True) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "logit_bias": _towards_an_end(thinking, calls),
        "chat_template_kwargs": {"thinking": thinking},
    }


def _tool(name: str, schema: Schema) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def _violated(text: str, schema: Schema) -> str | None:
    try:
        Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        reason = error.message if isinstance(error, ValidationError) else str(error)
        return f"{reason[:200]}: {text[:200]!r} of {json.dumps(schema)[:600]}"
    return None

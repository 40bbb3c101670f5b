"""A calculator as a tool of the model; the built-in model has learned to call it."""

from __future__ import annotations

import json
import re
from typing import Any

NAME = "calculator"
DESCRIPTION = "Works out one operation."
_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*")


def declaration(name: str = NAME, description: str = DESCRIPTION) -> dict[str, Any]:
    """Return the tool as an OpenAI client declares it."""
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def calculate(arguments: str) -> str:
    """Return the result of a call's arguments, `{"expression": "33 + 14"}`, or a text with their error."""
    try:
        found = _EXPRESSION.fullmatch(json.loads(arguments)["expression"])
    except (ValueError, TypeError, KeyError):
        return 'error: expected {"expression": "A + B"}'
    if not found or (found[2] == "/" and int(found[3]) == 0):
        return "error: expected one operation, as in 33 + 14"
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[found[2]])


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool messages that answer an assistant's message, in the order of its calls."""
    answers = []
    for call in message.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"]["arguments"]
        content = calculate(given) if name == NAME else f"error: no tool is named {name}"
        answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
    return answers

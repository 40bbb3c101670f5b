"""Ask a server one question and let it use a calculator. Thinking, text and tool calls are shown as they stream.

    python docs/examples/client.py "Mia has 33 apples and buys 14 more. How many apples does Mia have now?"

OPENAI_BASE_URL and OPENAI_API_KEY name another server and its key. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import openai

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out one operation.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MOST_ROUNDS = 20


def calculator(expression: str) -> str:
    """Return the result of `A + B`, `A - B` or `A * B`."""
    a, operator, b = expression.split()
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])


def streamed(client: openai.OpenAI, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request, print what arrives, and return the whole message. Thinking goes to stderr."""
    thinking, text = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            said = choice.delta.content or ""
            print(thought, end="", file=sys.stderr, flush=True)
            print(said, end="", flush=True)
            thinking, text = thinking + thought, text + said
            for piece in choice.delta.tool_calls or ():  # the first piece has id and name, the others more arguments
                function = {"name": piece.function.name, "arguments": ""}
                call = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": function})
                call["function"]["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking  # Kimi reads its own thinking between calls
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the calls of a message, print them, and return the messages that answer them."""
    answers = []
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        try:
            result = calculator(**json.loads(arguments))
        except Exception as error:  # the model reads it and tries again
            result = f"error: {error!r}"
        print(f"\n{call['function']['name']}({arguments}) = {result}")
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return answers


def main() -> None:
    """Ask until the model answers without a call."""
    parser = argparse.ArgumentParser(description="Ask a server one question and let it use a calculator.")
    parser.add_argument("question")
    parser.add_argument("--temperature", type=float, default=1.0, help="1.0 is Kimi's for thinking")
    given = parser.parse_args()
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9527/v1")
    messages: list[dict[str, Any]] = [{"role": "user", "content": given.question}]
    try:
        with openai.OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
            request = {"model": client.models.list().data[0].id, "tools": [CALCULATOR], "max_tokens": 4096}
            for _ in range(MOST_ROUNDS):
                message = streamed(client, {**request, "messages": messages, "temperature": given.temperature})
                messages += [message, *results(message)]
                if not message.get("tool_calls"):
                    print()
                    return
    except openai.OpenAIError as error:
        sys.exit(f"client.py: {base_url}: {error}")
    sys.exit(f"client.py: the model still calls tools after {MOST_ROUNDS} rounds")


if __name__ == "__main__":
    main()

"""Sessions of agent libraries: `python sessions.py SESSION URL QUESTION...` asks, and prints the answers.

This file runs in the environment of the libraries, so it imports nothing else. The scripted model calls
`search` and `add`, and answers.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

MODEL = "kimi-k2.5-tiny"
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAAAAABXZoBIAAAAFElEQVR4nGP4jwcwjEqOSo5KwgAA0FYNHk8YRIwAAAAASUVORK5CYII="
FACTS = {"Mia": 33, "Tom": 14}
Items = list[Any]


def search(name: str, limit: int = 5) -> str:
    """Search the notes for a person's apples."""
    return str(FACTS.get(name, "nothing found"))


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


TOOLS: dict[str, Any] = {"search": search, "add": add}
_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
SCHEMAS = {"search": _NAME, "add": _NUMBERS}


def _converse(questions: Sequence[str], turns: Items, ask: Callable[[Items], tuple[str, Items]], *more: Any) -> Items:
    """Ask each question until an answer needs no results of tools. more: parts of the first question after its text."""
    said: Items = []
    for question in questions:
        turns.append({"role": "user", "content": [*more] if more and not said else question})
        for _ in range(6):
            text, results = ask(turns)
            turns += results
            if not results:
                break
        said.append(text)
    return said


def agents_sdk(url: str, questions: Sequence[str], api: str, stream: bool) -> Items:
    agents: Any = importlib.import_module("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="any"))
    tools = [agents.function_tool(search), agents.function_tool(add)]
    agent = agents.Agent("notes", instructions="Use the tools.", model=model, tools=tools)

    async def session() -> Items:
        turns: Items = []
        said = []
        for question in questions:
            turns.append({"role": "user", "content": question})
            if stream:
                running = agents.Runner.run_streamed(agent, turns)
                async for _ in running.stream_events():
                    pass
            else:
                running = await agents.Runner.run(agent, turns)
            turns = running.to_input_list()
            said.append(running.final_output)
        return said

    return asyncio.run(session())


def pydantic_ai(url: str, questions: Sequence[str], api: str) -> Items:
    from pydantic_ai import Agent

    if api == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model: Any = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="any"))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
    agent = Agent(model, instructions="Use the tools.", tools=[search, add])
    history: Items = []
    said = []
    for question in questions:
        done = agent.run_sync(question, message_history=history)
        history = done.all_messages()
        said.append(done.output)
    return said


def langchain(url: str, questions: Sequence[str], api: str, stream: bool) -> Items:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    more = {"use_responses_api": api == "responses", "streaming": stream}
    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="any", **more)
    agent = create_agent(model, [search, add], system_prompt="Use the tools.")
    turns: Items = []
    said = []
    for question in questions:
        turns = agent.invoke({"messages": [*turns, {"role": "user", "content": question}]})["messages"]
        said.append(turns[-1].text)
    return said


def chat(url: str, questions: Sequence[str], stream: bool, library: str = "openai") -> Items:
    """With the library's own client; litellm gives the same objects."""
    client: Any = importlib.import_module(library)
    more = {"strict": stream}  # the client reads a stream of strict tools only
    functions = [{"name": name, "description": name, "parameters": schema, **more} for name, schema in SCHEMAS.items()]
    request: dict[str, Any] = {"tools": [{"type": "function", "function": function} for function in functions]}
    if library == "openai":
        client = client.OpenAI(base_url=f"{url}/v1", api_key="any")
        request["model"] = MODEL
    else:
        request |= {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "any", "stream": stream}

    def ask(turns: Items) -> tuple[str, Items]:
        if library != "openai":
            answer = client.completion(messages=turns, **request)
            answer = client.stream_chunk_builder(list(answer)) if stream else answer
        elif stream:
            with client.chat.completions.stream(messages=turns, **request) as running:
                for _ in running:
                    pass
                answer = running.get_final_completion()
        else:
            answer = client.chat.completions.create(messages=turns, **request)
        message = answer.choices[0].message
        turns.append(message.model_dump(exclude_none=True))
        results = [(call, TOOLS[call.function.name]) for call in message.tool_calls or ()]
        return message.content, [
            {"role": "tool", "tool_call_id": call.id, "content": tool(**json.loads(call.function.arguments))}
            for call, tool in results
        ]

    return _converse(questions, [], ask)


def anthropic(url: str, questions: Sequence[str], stream: bool) -> Items:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="any")
    tools: Items = [{"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    tools[0]["cache_control"] = {"type": "ephemeral"}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    first = {"type": "text", "text": questions[0], "cache_control": {"type": "ephemeral"}}
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 2048, "tools": tools, "system": "Use the tools."}
    request["thinking"] = {"type": "enabled", "budget_tokens": 1024}

    def ask(turns: Items) -> tuple[str, Items]:
        if stream:
            with client.messages.stream(messages=turns, **request) as running:
                answer = running.get_final_message()
        else:
            answer = client.messages.create(messages=turns, **request)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        turns.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": TOOLS[block.name](**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, [{"role": "user", "content": results}] if results else []

    return _converse(questions, [], ask, first, picture)


def openai_responses(url: str, questions: Sequence[str], stream: bool) -> Items:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    tools: Items = [
        {"type": "function", "name": name, "description": name, "parameters": schema, "strict": False}
        for name, schema in SCHEMAS.items()
    ]
    request: dict[str, Any] = {"model": MODEL, "tools": tools, "store": False}
    request["include"] = ["reasoning.encrypted_content"]

    def ask(turns: Items) -> tuple[str, Items]:
        if stream:
            with client.responses.stream(input=turns, **request) as running:
                for _event in running:
                    pass
                answer = running.get_final_response()
        else:
            answer = client.responses.create(input=turns, **request)
        turns += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        results = [(call.call_id, TOOLS[call.name](**json.loads(call.arguments))) for call in calls]
        return answer.output_text, [
            {"type": "function_call_output", "call_id": name, "output": result} for name, result in results
        ]

    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    return _converse(questions, [], ask, {"type": "input_text", "text": questions[0]}, picture)


SESSIONS: dict[str, Callable[[str, Sequence[str]], Items]] = {
    "openai-agents-chat": partial(agents_sdk, api="chat", stream=False),
    "openai-agents-chat-streamed": partial(agents_sdk, api="chat", stream=True),
    "openai-agents-responses": partial(agents_sdk, api="responses", stream=False),
    "openai-agents-responses-streamed": partial(agents_sdk, api="responses", stream=True),
    "pydantic-ai-chat": partial(pydantic_ai, api="chat"),
    "pydantic-ai-responses": partial(pydantic_ai, api="responses"),
    "pydantic-ai-messages": partial(pydantic_ai, api="messages"),
    "langchain-chat": partial(langchain, api="chat", stream=False),
    "langchain-responses": partial(langchain, api="responses", stream=False),
    "langchain-streamed": partial(langchain, api="chat", stream=True),
    "litellm": partial(chat, stream=False, library="litellm"),
    "litellm-streamed": partial(chat, stream=True, library="litellm"),
    "anthropic": partial(anthropic, stream=False),
    "anthropic-streamed": partial(anthropic, stream=True),
    "openai-chat": partial(chat, stream=False),
    "openai-chat-streamed": partial(chat, stream=True),
    "openai-responses": partial(openai_responses, stream=False),
    "openai-responses-streamed": partial(openai_responses, stream=True),
}

if __name__ == "__main__":
    print(json.dumps(SESSIONS[sys.argv[1]](sys.argv[2], sys.argv[3:])))

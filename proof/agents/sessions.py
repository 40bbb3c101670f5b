"""Sessions of agent libraries: `python sessions.py LIBRARY URL` asks a question with two tools and prints the answer.

This file runs in the environment of the libraries, so it imports nothing else. The scripted model calls `search`, then
`add` twice, and answers.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

MODEL = "kimi-k2.5-tiny"
QUESTION = "How many apples do Mia and Tom have? Search for both, then add."
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAAAAABXZoBIAAAAFElEQVR4nGP4jwcwjEqOSo5KwgAA0FYNHk8YRIwAAAAASUVORK5CYII="
FACTS = {"Mia": 33, "Tom": 14}


def search(name: str, limit: int = 5) -> str:
    """Search the notes for a person's apples."""
    return str(FACTS.get(name, "nothing found"))


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


TOOLS: dict[str, Any] = {"search": search, "add": add}


def agents_sdk(url: str, responses: bool, stream: bool) -> str:
    agents: Any = importlib.import_module("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
    model = (agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel)(MODEL, client)
    tools = [agents.function_tool(search), agents.function_tool(add)]
    agent = agents.Agent("notes", instructions="Use the tools.", model=model, tools=tools)

    async def session() -> str:
        if not stream:
            first = await agents.Runner.run(agent, QUESTION)
            return (
                await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Thanks."}])
            ).final_output
        running = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return running.final_output

    return asyncio.run(session())


def pydantic_ai(url: str, api: str, stream: bool) -> str:
    from pydantic import BaseModel
    from pydantic_ai import Agent

    class Apples(BaseModel):
        total: int
        people: list[str]

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

    async def session() -> str:
        if stream:
            async with agent.run_stream(QUESTION) as running:
                text = "".join([piece async for piece in running.stream_text(delta=True)])
            return text
        first = await agent.run(QUESTION)
        return (await agent.run("Thanks.", message_history=first.all_messages())).output

    answer = asyncio.run(session())
    if api == "chat" and not stream:  # an output type forces a call of its own tool
        try:
            Agent(model, output_type=Apples).run_sync("33 and 14 apples")
        except Exception as error:
            print(f"structured: {type(error).__name__}", file=sys.stderr)
    return answer


def langchain(url: str, responses: bool, stream: bool) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="any", use_responses_api=responses, streaming=stream)
    agent = create_agent(model, [search, add], system_prompt="Use the tools.")
    said = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    said = agent.invoke({"messages": [*said["messages"], {"role": "user", "content": "Thanks."}]})
    return str(said["messages"][-1].content)


def litellm(url: str, stream: bool) -> str:
    import litellm as library

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    numbers = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    tools = [
        {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": schema}},
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": numbers}},
    ]
    for _ in range(6):
        answer = library.completion(
            model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="any", messages=messages, tools=tools, stream=stream
        )
        answer = library.stream_chunk_builder(list(answer)) if stream else answer
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return str(message.content)


def smolagents(url: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def lookup(name: str) -> str:
        """Search the notes for a person's apples.

        Args:
            name: The person.
        """
        return search(name)

    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key="any")
    return str(ToolCallingAgent(tools=[lookup], model=model, max_steps=3, verbosity_level=0).run(QUESTION))


def anthropic(url: str, stream: bool) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="any")
    name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    numbers = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    tools = [
        {"name": "search", "description": "Search.", "input_schema": name, "cache_control": {"type": "ephemeral"}},
        {"name": "add", "description": "Add.", "input_schema": numbers},
    ]
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    first = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}, picture]
    messages: list[Any] = [{"role": "user", "content": first}]
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 2048, "tools": tools, "system": "Use the tools."}
    request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    for _ in range(6):
        if stream:
            with client.messages.stream(messages=messages, **request) as running:
                answer = running.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **request)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": TOOLS[block.name](**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
    return "".join(block.text for block in answer.content if block.type == "text")


def openai_responses(url: str, stream: bool) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    numbers = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    tools: list[Any] = [
        {"type": "function", "name": "search", "description": "Search.", "parameters": name, "strict": False},
        {"type": "function", "name": "add", "description": "Add.", "parameters": numbers, "strict": False},
    ]
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, picture]}]
    for _ in range(6):
        request: dict[str, Any] = {"model": MODEL, "input": items, "tools": tools, "store": False}
        request["include"] = ["reasoning.encrypted_content"]
        if stream:
            with client.responses.stream(**request) as running:
                for _event in running:
                    pass
                answer = running.get_final_response()
        else:
            answer = client.responses.create(**request)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return answer.output_text


SESSIONS: dict[str, Any] = {
    "openai-agents-chat": lambda url: agents_sdk(url, responses=False, stream=False),
    "openai-agents-chat-streamed": lambda url: agents_sdk(url, responses=False, stream=True),
    "openai-agents-responses": lambda url: agents_sdk(url, responses=True, stream=False),
    "openai-agents-responses-streamed": lambda url: agents_sdk(url, responses=True, stream=True),
    "pydantic-ai-chat": lambda url: pydantic_ai(url, "chat", stream=False),
    "pydantic-ai-responses": lambda url: pydantic_ai(url, "responses", stream=False),
    "pydantic-ai-messages": lambda url: pydantic_ai(url, "messages", stream=False),
    "langchain-chat": lambda url: langchain(url, responses=False, stream=False),
    "langchain-responses": lambda url: langchain(url, responses=True, stream=False),
    "langchain-streamed": lambda url: langchain(url, responses=False, stream=True),
    "litellm": lambda url: litellm(url, stream=False),
    "litellm-streamed": lambda url: litellm(url, stream=True),
    "smolagents": smolagents,
    "anthropic": lambda url: anthropic(url, stream=False),
    "anthropic-streamed": lambda url: anthropic(url, stream=True),
    "openai-responses": lambda url: openai_responses(url, stream=False),
    "openai-responses-streamed": lambda url: openai_responses(url, stream=True),
}

if __name__ == "__main__":
    print(SESSIONS[sys.argv[1]](sys.argv[2]))

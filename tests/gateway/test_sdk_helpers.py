"""The SDKs' own helpers over the gateway: parsed answers, streams of events, and loops that run tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from anthropic import beta_async_tool
from pydantic import BaseModel
from support.gateway_app import ADDRESS, MODEL, App, ScriptedEngine, renderer

CALL = (
    "I add.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 33, "b": 14}<|tool_call_end|><|tool_calls_section_end|>'
)
QUESTION: Any = [{"role": "user", "content": "What is 33 + 14?"}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}
RESPONSES_TOOL: Any = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
Steps = Callable[[Any], Awaitable[Any]]


class Total(BaseModel):
    total: int


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def run(sdk: Any, steps: Steps, *said: str) -> tuple[Any, ScriptedEngine]:
    """Return what the steps find with a client of an SDK, and the engine, which says these texts in turn."""
    texts = list(said)
    engine = ScriptedEngine(lambda: texts.pop(0))

    async def all_steps() -> Any:
        package, url = (httpx2, ADDRESS) if sdk is anthropic.AsyncAnthropic else (httpx, f"{ADDRESS}/v1")
        async with package.AsyncClient(transport=package.ASGITransport(App(engine))) as http:
            return await steps(sdk(base_url=url, api_key="none", http_client=http, max_retries=0))

    return asyncio.run(all_steps()), engine


def test_openai_parses_an_answer_by_a_class() -> None:
    async def chat(client: openai.AsyncOpenAI) -> Any:
        answer = await client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Total)
        return answer.choices[0].message.parsed

    async def responses(client: openai.AsyncOpenAI) -> Any:
        return (await client.responses.parse(model=MODEL, input=QUESTION, text_format=Total)).output_parsed

    for steps in (chat, responses):
        found, engine = run(openai.AsyncOpenAI, steps, 'Hm.</think>{"total": 47}')
        assert found == Total(total=47)
        assert json.loads(engine.seen[0]["sampling_params"]["json_schema"])["required"] == ["total"]


def test_openai_gathers_a_stream() -> None:
    async def chat(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[CHAT_TOOL]) as stream:
            kinds = {event.type async for event in stream}
            message = (await stream.get_final_completion()).choices[0].message
            call = message.tool_calls[0].function
            return kinds, call.name, call.parsed_arguments

    async def responses(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model=MODEL, input=QUESTION, tools=[RESPONSES_TOOL]) as stream:
            kinds = {event.type async for event in stream}
            call: Any = (await stream.get_final_response()).output[-1]
            return kinds, call.name, call.parsed_arguments

    for steps, kind in (
        (chat, "tool_calls.function.arguments.done"),
        (responses, "response.function_call_arguments.done"),
    ):
        (kinds, name, arguments), _ = run(openai.AsyncOpenAI, steps, CALL)
        assert kind in kinds and (name, arguments) == ("add", {"a": 33, "b": 14})


def test_anthropic_parses_an_answer_and_gathers_a_stream() -> None:
    async def parse(client: anthropic.AsyncAnthropic) -> Any:
        answer = await client.messages.parse(model=MODEL, messages=QUESTION, max_tokens=64, output_format=Total)
        return answer.parsed_output

    async def stream(client: anthropic.AsyncAnthropic) -> Any:
        async with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=64) as running:
            text = "".join([piece async for piece in running.text_stream])
            return text, (await running.get_final_message()).stop_reason

    assert run(anthropic.AsyncAnthropic, parse, 'Hm.</think>{"total": 47}')[0] == Total(total=47)
    assert run(anthropic.AsyncAnthropic, stream, "Hm.</think>It is 47.")[0] == ("It is 47.", "end_turn")


def test_anthropics_tool_runner_sends_the_whole_conversation() -> None:
    """The runner asks for a thread, in which it would send the tool's result alone, and goes on without one."""

    async def loop(client: anthropic.AsyncAnthropic) -> Any:
        runner = client.beta.messages.tool_runner(model=MODEL, messages=QUESTION, max_tokens=64, tools=[add])
        return (await runner.until_done()).content[-1].text

    found, engine = run(anthropic.AsyncAnthropic, loop, CALL, "Hm.</think>It is 47.")
    assert found == "It is 47."
    prompt = renderer().decode(engine.seen[1]["input_ids"])
    assert prompt.index("What is 33 + 14?") < prompt.index("functions.add:0") < prompt.index("47")

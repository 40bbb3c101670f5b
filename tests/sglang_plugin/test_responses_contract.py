"""SGLang's own /v1/responses with our hooks, over answers that no engine wrote: cut calls, namespaces, token limits."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import asyncio, json
from types import SimpleNamespace as Some
from sglang.srt.entrypoints.context import SimpleContext
from sglang.srt.entrypoints.openai import serving_responses
from sglang.srt.entrypoints.openai.protocol import RequestResponseMetadata, ResponsesRequest
Responses = serving_responses.OpenAIServingResponses
serving_responses.get_serving = lambda: Some(incremental_streaming_output=False)

serving = Responses.__new__(Responses)
more = dict(
    use_harmony=False, tool_call_parser="kimi_k2", reasoning_parser="kimi_k2", enable_response_store=False,
    enable_prompt_tokens_details=False, tokenizer_manager=Some(tokenizer=None),
    template_manager=Some(force_reasoning=True), _encoding_adapter=None,
)
vars(serving).update(more)
plain = {"type": "function", "name": "search", "parameters": {"type": "object"}}
members = [
    {"type": "function", "name": "search", "description": "Finds.", "parameters": {"type": "object"}, "strict": False},
    {"name": "wait"},
    {"type": "function", "name": ""},
]
tools = [
    plain,
    {"type": "namespace", "name": "mcp__notes__", "tools": members},
    {"type": "namespace", "name": "agents", "tools": members},
]

def asked(**fields):
    return ResponsesRequest(model="m", input="?", tools=tools, **fields)

def written(name, arguments, end="<|tool_call_end|><|tool_calls_section_end|>"):
    begin = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"I think.</think>I look.{begin}{arguments}{end}"

def meta(finish):
    return {"finish_reason": finish and {"type": finish}, "prompt_tokens": 1, "completion_tokens": 2}

async def whole(text, finish, **fields):
    async def generated(context):
        context.append_output({"text": text, "meta_info": meta(finish)})
        yield context
    context = SimpleContext()
    answer = await serving.responses_full_generator(
        asked(**fields), {}, generated(context), context, "m", None, RequestResponseMetadata(request_id="r"),
        require_reasoning=True)
    return answer.model_dump()

async def streamed(text, finish, **fields):
    async def generated():
        for end in range(9, len(text) + 9, 9):
            yield {"text": text[:end], "meta_info": meta(finish if end >= len(text) else None)}
    events = serving.responses_stream_generator_non_harmony(
        asked(stream=True, **fields), {}, generated(), "m", None, RequestResponseMetadata(request_id="r"),
        require_reasoning=True)
    found = []
    async for event in events:
        head, data = event.split("data: ", 1)
        found.append(json.loads(data))
        assert head in ("", f"event: {found[-1]['type']}\\n"), head
    return found

def calls(items):
    keys = ("namespace", "name", "arguments", "status")
    return [[item.get(key) for key in keys] for item in items if item["type"] == "function_call"]

def read(text, finish, **fields):
    answer, events = asyncio.run(whole(text, finish, **fields)), asyncio.run(streamed(text, finish, **fields))
    last = events[-1]["response"]
    return {
        "whole": [answer["status"], answer["incomplete_details"], calls(answer["output"])],
        "streamed": [last["status"], last["incomplete_details"], calls(last["output"])],
        "ends": events[-1]["type"],
        "items": calls([event["item"] for event in events if event["type"] == "response.output_item.done"]),
        "added": calls([event["item"] for event in events if event["type"] == "response.output_item.added"]),
        "names": [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"],
        "arguments": "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"),
    }

CUT = '{"query": "a'
CHOICE = {"type": "function", "namespace": "agents", "name": "wait"}
def chosen(**choice):
    choice = asked(tool_choice={"type": "function", **choice}).effective_tool_choice()
    return [choice if isinstance(choice, str) else None, serving._chat_tool_choice(choice)["function"]["name"]]

def limit(room, asked_for):
    request = asked(**({} if asked_for is None else {"max_output_tokens": asked_for}))
    return request.to_sampling_params(room, {})["max_new_tokens"]

print(json.dumps({
    "done": read(written("search", '{"query": 1}'), "stop"),
    "cut": read(written("search", CUT, ""), "length"),
    "stopped": read(written("search", CUT, ""), "stop", stop=["b"]),
    "malformed": read(written("search", CUT), "stop"),
    "cut before": read(written("search", "", ""), "length"),
    "member": read(written("mcp__notes__search", '{"query": 1}'), "stop"),
    "cut member": read(written("agents__wait", CUT, ""), "length", tool_choice=CHOICE),
    "declared": [
        [tool.function.name, tool.function.description] for tool in serving._response_tools_to_chat_tools(asked())
    ],
    "chosen": [
        chosen(name="search", namespace="agents"), chosen(name="agents__search"),
        chosen(name="wait", namespace="agents"), chosen(function={"name": "agents__wait"}),
        chosen(name="search"), chosen(name="wait"), chosen(name="unknown"), chosen(name="unknown", namespace="agents"),
    ],
    "limits": [limit(512, 1), limit(512, 2), limit(512, 100), limit(512, 511), limit(512, None)],
}))
"""
LENGTH = {"reason": "max_output_tokens"}
STOP = {"reason": "stop"}


@BOTH
def test_a_cut_call_is_incomplete_whole_and_streamed(newest: bool) -> None:
    got = found(PROGRAM, newest)
    cut = [None, "search", '{"query": "a', "incomplete"]
    for case, status, why, call in (
        ("done", "completed", None, [None, "search", '{"query": 1}', "completed"]),
        ("cut", "incomplete", LENGTH, cut),
        ("stopped", "incomplete", STOP, cut),
        ("malformed", "completed", None, cut),
        ("cut before", "incomplete", LENGTH, [None, "search", "", "incomplete"]),
    ):
        answer = got[case]
        assert answer["whole"] == answer["streamed"] == [status, why, [call]], case
        assert answer["items"] == [call] and answer["ends"] == f"response.{status}", case
        assert answer["added"] == [[None, "search", "", "in_progress"]]
        assert answer["names"] == ["search"] and answer["arguments"] == call[2]


@BOTH
def test_the_model_sees_functions_of_namespaces_and_the_client_gets_both_names_back(newest: bool) -> None:
    got = found(PROGRAM, newest)
    functions = ["search", "mcp__notes__search", "mcp__notes__wait", "agents__search", "agents__wait"]
    assert [name for name, _ in got["declared"]] == functions
    assert got["declared"][1] == ["mcp__notes__search", "Finds."]
    call = ["mcp__notes__", "search", '{"query": 1}', "completed"]
    assert got["member"]["whole"] == got["member"]["streamed"] == ["completed", None, [call]]
    assert got["member"]["items"] == [call] and got["member"]["names"] == ["search"]
    assert got["member"]["added"] == [["mcp__notes__", "search", "", "in_progress"]]
    forced = [["required", name] for name in ("agents__search", "agents__search", "agents__wait", "agents__wait")]
    assert got["chosen"] == [*forced, *([None, name] for name in ("search", "wait", "unknown", "unknown"))]
    cut = ["agents", "wait", '{"query": "a', "incomplete"]
    assert got["cut member"]["whole"] == got["cut member"]["streamed"] == ["incomplete", LENGTH, [cut]]


@BOTH
def test_an_answer_may_have_all_tokens_that_the_client_allows(newest: bool) -> None:
    """SGLang takes two off, and refused 1; two before the end of the context stay."""
    assert found(PROGRAM, newest)["limits"] == [1, 2, 100, 510, 510]

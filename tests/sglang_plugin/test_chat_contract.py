"""SGLang's own functions with our hooks: ids and broken calls of a conversation, calls that an answer did not end."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import json
from types import SimpleNamespace as Some
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Tool
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses as Responses
from sglang.srt.utils.weight_versions import build_endpoint_weight_version_metadata
from kimi_w4a8_eagle3.sglang_plugin.http import chat_contract

CUT = '{"query": "a'
Chat = serving_chat.OpenAIServingChat
schema = {"type": "object", "properties": {"query": {"type": "string"}}}
tools = [Tool(type="function", function={"name": "search", "parameters": schema})]

def call(arguments, call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}

def conversation(parser):
    request = ChatCompletionRequest(model="m", messages=[
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call(CUT), call("{}", "x")]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ])
    chat_contract.prepare(Some(tool_call_parser=parser, reasoning_parser=None), request)
    calls = [call.id for message in request.messages for call in getattr(message, "tool_calls", None) or ()]
    return calls, [message.tool_call_id for message in request.messages if message.role == "tool"]

def rendered(*arguments):
    message = {"role": "assistant", "tool_calls": [call(one) for one in arguments]}
    serving_chat.normalize_assistant_tool_call_arguments(message)
    return [call["function"]["arguments"] for call in message["tool_calls"]]

def replayed(arguments):
    item = {"type": "function_call", "call_id": "call_1", "name": "search", "arguments": arguments}
    message = Responses._normalize_response_message_for_chat(item)
    return message["tool_calls"][0]["function"]["arguments"]

def written(arguments):
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    return f"{begin}{arguments}<|tool_call_end|><|tool_calls_section_end|>"

manager = Some(tokenizer=None)
def whole(arguments, finish):
    serving = Some(tool_call_parser="kimi_k2", tokenizer_manager=manager, _process_tool_call_id=lambda *_: "id")
    serving._tool_calls = []
    result = Chat._process_tool_calls(serving, written(arguments), tools, {"type": finish})
    return [result.finish_reason["type"], [call.function.arguments for call in result.tool_calls]]

versions = [{"version": "v", "start": 0, "end": 3}]
print(json.dumps({
    "kimi": conversation("kimi_k2"), "others": conversation("hermes"),
    "rendered": rendered('{"query": 1}', CUT, "[1]"),
    "replayed": [replayed(CUT), replayed('{"query":1}'), replayed("")],
    "whole": [whole('{"query": "a"}', "stop"), whole(CUT, "stop"), whole(CUT, "length")],
    "metadata": build_endpoint_weight_version_metadata({"weight_version": "v", "weight_versions": versions}),
}))
"""


@BOTH
def test_conversations_are_kimis_and_calls_that_did_not_end_are_told(newest: bool) -> None:
    got = found(PROGRAM, newest)
    assert got["kimi"] == [["functions.search:0", "functions.search:1"], ["functions.search:1", "functions.search:0"]]
    assert got["others"] == [["call_1", "x"], ["x", "call_1"]]
    assert got["rendered"] == [{"query": 1}, '{"query": "a', "[1]"]
    assert got["replayed"] == ['{"query": "a', '{"query":1}', "{}"]
    assert got["whole"] == [
        ["tool_calls", ['{"query": "a"}']], ["stop", ['{"query": "a']], ["length", ['{"query": "a']],
    ]  # fmt: skip
    assert got["metadata"] == {"weight_version": "v"}

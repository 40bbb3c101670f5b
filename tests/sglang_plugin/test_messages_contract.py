"""Answers of /v1/messages: calls that are no object, and signatures of thinking, whole and streamed."""

from __future__ import annotations

import json

from support.sglang_program import BOTH, found

PROGRAM = """
import asyncio, json
from support.engineless import client, prompts, text_of
from kimi_w4a8_eagle3.sglang_plugin.http.sealed_thinking import sealed

TOOL = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
QUESTION = {"role": "user", "content": "?"}
words = ["I think.</think>Done."]

def called(*arguments):
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    calls = [f"<|tool_call_begin|>functions.search:{at}<|tool_call_argument_begin|>{one}<|tool_call_end|>"
             for at, one in enumerate(arguments)]
    return "Hm.</think>" + begin + "".join(calls) + end

async def main():
    async with client(8192, lambda: words[0]) as server:
        async def ask(*more, **named):
            body = {"model": "kimi-k2.5-tiny", "messages": [QUESTION, *more], "max_tokens": 64, **named}
            return await server.post("/v1/messages", json=body, headers={"x-number": "0"})

        async def broken(*arguments):
            words[0] = called(*arguments)
            answer = await ask(tools=[TOOL])
            return [answer.status_code, answer.json()]

        thought = (await ask()).json()["content"]
        streamed = [json.loads(line[6:]) for line in (await ask(stream=True)).text.splitlines() if line[:6] == "data: "]
        statuses = {}
        for given in (thought[0]["signature"], "another", "", "größer", None):
            said = {"role": "assistant", "content": [{**thought[0], "signature": given}, thought[1]]}
            statuses[str(given)[:7]] = (await ask(said, QUESTION)).status_code
        untold = {"type": "thinking", "thinking": "", "signature": thought[0]["signature"]}
        call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
        await ask({"role": "assistant", "content": [untold, call]}, result)
        restored = "<think>I think.</think>" in text_of(prompts["0"])
        words[0] = called("null")
        null = (await ask(tools=[TOOL], stream=True)).text
        words[0] = "</think>Done."
        return {
            "thought": thought, "expected": sealed("I think."), "other": sealed("I think"), "streamed": streamed,
            "restored": restored, "null": '"partial_json":"{}"' in null and '"partial_json":"null"' not in null,
            "statuses": list(statuses.values()), "unthought": (await ask()).json()["content"],
            "broken": {one: await broken(one) for one in json.loads(%r)},
            "beside": await broken('{"query": "b"}', "[1, 2]"),
        }

print(json.dumps(asyncio.run(main())))
"""
BROKEN = json.dumps(
    ["null", "[1, 2]", r'{"query": "\ud800"}', '{"query": 1e400}', "1e400", '{"query": NaN}', "7", '{"query": ']
)


@BOTH
def test_arguments_that_are_no_object_become_text_and_null_means_none(newest: bool) -> None:
    got = found(PROGRAM % BROKEN, newest)
    status, answer = got["broken"].pop("null")
    assert (status, answer["stop_reason"], answer["content"][1]["input"]) == (200, "tool_use", {}) and got["null"]
    assert len(got["broken"]) == 7
    for arguments, (status, answer) in got["broken"].items():
        assert (status, answer["stop_reason"]) == (200, "end_turn"), arguments
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert answer["content"][1]["text"] == f"search {arguments.strip()}"
    status, answer = got["beside"]
    assert (status, answer["stop_reason"]) == (200, "tool_use")
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]


@BOTH
def test_thinking_has_a_signature_with_its_copy_that_any_other_may_replace(newest: bool) -> None:
    got = found(PROGRAM % BROKEN, newest)
    thought, said = got["thought"]
    assert thought == {"type": "thinking", "thinking": "I think.", "signature": got["expected"]}
    assert (said["text"], got["expected"] != got["other"]) == ("Done.", True)
    events = [event for event in got["streamed"] if event.get("index") == 0]
    assert events[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "content_block_stop"]
    assert events[-2]["delta"] == {"type": "signature_delta", "signature": got["expected"]}
    assert sum("signature" in event.get("delta", ()) for event in got["streamed"]) == 1
    assert got["statuses"] == [200] * 5 and got["restored"]
    assert [block["type"] for block in got["unthought"]] == ["text"]

"""Recorded requests of real agents pass the door and SGLang's own endpoints; only the engine behind them is missing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support import recorded
from support.sglang_program import BOTH, found

ANSWER = "<|im_assistant|>assistant<|im_middle|>"
CONTEXT = 131072  # of the recipe `agent`
PROGRAM = """
import asyncio, json, os
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
import httpx
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, prepare_server_args
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_eagle3.sglang_plugin import door
from support import recorded

argv = render(load_recipe("tiny"), ["context-length=%d"]).argv
args = prepare_server_args(argv[argv.index("sglang.launch_server") + 1:])
args.resolve_once()
args.check_server_args()
publish(args, role="tokenizer")
manager, templates = init_tokenizer_manager(args, PortArgs.init_new(args))
manager.model_config.is_multimodal = True  # SGLang refuses pictures before it renders the prompt
prompts = {}

async def engine(request, http=None):
    request.normalize_batch_and_arguments()
    prompts[http.headers["x-number"]] = request.text or manager.tokenizer.decode(request.input_ids)
    text = "I think.</think>Done."
    meta = {"id": request.rid, "finish_reason": {"type": "stop", "matched": None}, "prompt_tokens": 1}
    meta |= {"completion_tokens": 1, "cached_tokens": 0, "weight_version": "default"}
    yield {"text": text, "output_ids": manager.tokenizer.encode(text), "meta_info": meta, "index": 0}

manager.generate_request = engine
http_server.set_global_state(http_server._GlobalState(manager, templates, {}))
state = http_server.app.state
state.openai_serving_chat = manager.serving_chat_class(manager, templates)
state.anthropic_serving = http_server.AnthropicServing(state.openai_serving_chat)
state.openai_serving_responses = OpenAIServingResponses(manager, templates)
door.guard_http_server(lambda *_: None, args, manager)

async def main():
    transport = httpx.ASGITransport(http_server.app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9527", timeout=200) as client:
        async def ask(number, row):
            answer = await client.post(row["path"], json=row["body"], headers={"x-number": str(number)})
            return [answer.status_code, answer.text[-300:], prompts.get(str(number), "").count(%r)]
        return await asyncio.gather(*(ask(*numbered) for numbered in enumerate(recorded.rows("requests"))))

print(json.dumps({"answers": asyncio.run(main())}))
"""


def answers_of(body: dict[str, Any]) -> int:
    """The number of answers of the assistant in a body: its items between what others say are one."""
    said = [item.get("role") or ("tool" if item["type"].endswith("_output") else "assistant") for item in items(body)]
    return sum(role == "assistant" and before != "assistant" for before, role in zip(["", *said], said, strict=False))


def items(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages") or body["input"]
    return given if isinstance(given, list) else []


@pytest.fixture(scope="module")
def answers() -> Any:
    return lambda newest: found(PROGRAM % (CONTEXT, ANSWER), newest)["answers"]


@BOTH
def test_every_request_is_served(answers: Any, newest: bool) -> None:
    asked = recorded.rows("requests")
    refused = {
        (row["session"], row["path"]): said
        for row, (status, said, _) in zip(asked, answers(newest), strict=True)
        if status != 200 or '"error":{' in said
    }
    assert refused == {}
    assert len({row["session"] for row in asked}) >= 20
    assert all(count >= 3 for count in Counter(row["session"] for row in asked).values())


@BOTH
def test_an_answer_that_is_sent_back_is_one_answer(answers: Any, newest: bool) -> None:
    """SGLang splits an answer into several where its items differ in `phase`, which SGLang itself gave them."""
    split = {
        (row["session"], number)
        for number, (row, (_, _, count)) in enumerate(zip(recorded.rows("requests"), answers(newest), strict=True))
        if count != answers_of(row["body"]) + 1
    }
    assert split == set()

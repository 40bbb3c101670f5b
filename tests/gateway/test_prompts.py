"""Prompts: one conversation is one prompt on three APIs, the one that SGLang's chat endpoint makes of it.

CONVERSATIONS=500 draws 500 conversations instead of 60.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import pytest
from support.conversations import FORMS, Turn, conversations
from support.gateway_app import MODEL, App, ScriptedEngine
from support.sglang_program import BOTH, found

COUNT = int(os.environ.get("CONVERSATIONS", "60"))
CHAT = "/v1/chat/completions"
PROGRAM = """
import json
from types import SimpleNamespace as Some
from kimi_w4a8_laptop import tiny
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(tiny.target_path())

class Chat(OpenAIServingChat):
    def __getattr__(self, name):
        # Flags of other models' encodings and tokenizers, which __init__ reads from their configurations.
        if name.startswith(("is_", "_prompt_text_")):
            return False
        raise AttributeError(name)

serving = Chat.__new__(Chat)
templates = Some(
    chat_template_name=None, jinja_template_content_format="openai", reasoning_config=None, force_reasoning=True,
    jinja_template_may_reorder_tool_results=False, python_chat_template=None,
)
vars(serving).update(
    tokenizer_manager=Some(tokenizer=tokenizer), template_manager=templates, default_chat_template_kwargs=None,
    reasoning_parser="kimi_k2", tool_call_parser=None, chat_encoding_spec=None,
    _tokenizer_auto_adds_specials=False, _encoding_adapter=None, _reasoning_detector=None, _chat_template_cache={},
)

def ids(body):
    request = ChatCompletionRequest(model="m", **body)
    return serving._apply_jinja_template(request, [tool.model_dump() for tool in request.tools], False).prompt_ids

print(json.dumps({"ids": [ids(body) for body in json.load(open(%r))]}))
"""


@cache
def drawn() -> list[list[Turn]]:
    return list(conversations(COUNT, seed=50))


def rendered(path: str, turns: list[Turn]) -> list[int]:
    engine = ScriptedEngine()
    answer = App(engine, context=131072).ask(path, {"model": MODEL, **FORMS[path](turns)})
    assert answer.status_code == 200, (path, answer.text[:500])
    ids: list[int] = engine.seen[0]["input_ids"]
    return ids


@cache
def by_chat() -> list[list[int]]:
    return [rendered(CHAT, turns) for turns in drawn()]


@pytest.mark.parametrize("path", [path for path in FORMS if path != CHAT])
def test_three_apis_render_the_same_token_ids(path: str) -> None:
    assert [rendered(path, turns) for turns in drawn()] == by_chat()


def numbered(body: dict[str, Any]) -> dict[str, Any]:
    """Give the calls the ids that the gateway gives them: SGLang renders those of the client."""
    count, ids = 0, {}
    for message in body["messages"]:
        for call in message.get("tool_calls") or ():
            given, call["id"] = call["id"], f"functions.{call['function']['name']}:{count}"
            ids[given] = call["id"]
            count += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return body


@pytest.mark.slow
@BOTH
def test_sglangs_chat_endpoint_renders_the_same(newest: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("bodies") / "bodies.json"
    file.write_text(json.dumps([numbered(FORMS[CHAT](turns)) for turns in drawn()]))
    assert found(PROGRAM % str(file), newest)["ids"] == by_chat()

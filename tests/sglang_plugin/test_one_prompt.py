"""One conversation is one prompt: chat, responses and messages render the same token ids, thinking included.

CONVERSATIONS=500 sends 500 conversations to each API instead of 60.
"""

from __future__ import annotations

import os

from support.sglang_program import BOTH, found

COUNT = int(os.environ.get("CONVERSATIONS", "60"))
PROGRAM = """
import asyncio, json, os, re
from support.conversations import FORMS, conversations
from support.engineless import client, prompts, text_of
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

async def main():
    drawn = list(conversations(%d, seed=50))
    async with client(131072) as server:
        async def rendered(path, body):
            answer = await server.post(path, json={"model": "kimi-k2.5-tiny", **body}, headers={"x-number": path})
            assert answer.status_code == 200, (path, answer.text[:500])
            return prompts.pop(path)

        async def differing():
            different = {}
            for number, turns in enumerate(drawn):
                ids = {path: await rendered(path, form(turns)) for path, form in FORMS.items()}
                for path in FORMS:
                    if ids[path] != ids["/v1/chat/completions"]:
                        right, got = (text_of(ids[one]) for one in ("/v1/chat/completions", path))
                        start = max(0, len(os.path.commonprefix([right, got])) - 40)
                        different.setdefault(path, []).append([number, right[start:][:120], got[start:][:120]])
            return different

        hooked, numbered = await differing(), 0
        for turns in drawn:  # whatever ids the client made
            text = text_of(await rendered("/v1/messages", FORMS["/v1/messages"](turns)))
            names = [call.name for turn in turns for call in turn.calls or ()]
            written = re.findall(r"<.tool_call_begin.>(.*?)<", text)
            assert written == [f"functions.{name}:{at}" for at, name in enumerate(names)], text
            numbered += len(written)
        OpenAIServingChat.supports_native_reasoning_history = lambda serving: False
        return {
            "different": hooked, "spliced": {path: len(found) for path, found in (await differing()).items()},
            "numbered": numbered, "turns": sum(len(turns) for turns in drawn),
            "thinking": sum(any(turn.thinking for turn in turns) for turns in drawn),
        }

print(json.dumps(asyncio.run(main())))
"""


@BOTH
def test_three_apis_render_the_same_token_ids_and_a_splice_is_found(newest: bool) -> None:
    got = found(PROGRAM % COUNT, newest)
    assert got["different"] == {}
    assert got["numbered"] > COUNT and got["turns"] > 4 * COUNT and got["thinking"] > COUNT // 2
    assert list(got["spliced"]) == ["/v1/messages"] and got["spliced"]["/v1/messages"] > COUNT // 2

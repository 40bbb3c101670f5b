"""Thinking that a client keeps, as `encrypted_content` on /v1/responses."""

from __future__ import annotations

import base64

import pytest
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.sglang_plugin.http import sealed_thinking
from kimi_w4a8_eagle3.sglang_plugin.http.sealed_thinking import sealed, unsealed

PROGRAM = """
import asyncio, json
from support.engineless import client, prompts, text_of

USER = {"role": "user", "content": "?"}
CALL = [
    {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
]

async def main():
    async with client(8192) as server:
        async def ask(given="?", **named):
            body = {"model": "kimi-k2.5-tiny", "input": given, **named}
            answer = await server.post("/v1/responses", json=body, headers={"x-number": "0"})
            if not named.get("stream"):
                return answer.status_code, answer.json()
            return [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]

        async def prompt(text):
            await ask([USER, {"type": "reasoning", "summary": [], "encrypted_content": text}, *CALL])
            return text_of(prompts["0"])

        _, first = await ask()
        text = first["output"][0]["encrypted_content"]
        return {
            "first": first, "last": (await ask(stream=True))[-1]["response"],
            "read": await prompt(text), "changed": await prompt(text[:-4] + "AAAA"),
            "others": await prompt("gAAAAABo"), "sglang": await prompt("sglang-reasoning-v1.eJzzVCjJyMzL1gMAC-ICtg=="),
        }

print(json.dumps(asyncio.run(main())))
"""


@BOTH
def test_a_client_that_keeps_the_conversation_gets_its_thinking_back(newest: bool) -> None:
    got = found(PROGRAM, newest)
    for answer in (got["first"], got["last"]):
        thinking, said = answer["output"]
        assert unsealed(thinking["encrypted_content"]) == thinking["content"][0]["text"] == "I think."
        assert answer["store"] is False and said["content"][0]["text"] == "Done."
    assert "<think>I think.</think>" in got["read"]
    assert all("I think." not in got[name] for name in ("changed", "others", "sglang"))


@pytest.mark.parametrize("thinking", ["", "größer", "\ud800", "x" * 100_000])
def test_only_this_servers_key_makes_a_text_that_it_reads(thinking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = sealed(thinking)
    assert unsealed(text) == thinking
    longer = base64.urlsafe_b64encode(base64.urlsafe_b64decode(text.partition(".")[2]) + b"x").decode()
    for other in (None, 3, "", text[1:], text + "ß", f"kimi-thinking-v1.{longer}"):
        assert unsealed(other) is None
    monkeypatch.setattr(sealed_thinking, "_key", lambda: b"another")
    assert unsealed(text) is None

"""Prompts without room in the context, as each API says it: whole, streamed, and with the answer's tokens."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import asyncio, json
from support.engineless import client

FORMS = {
    "/v1/chat/completions": ("messages", "max_tokens"), "/v1/messages": ("messages", "max_tokens"),
    "/v1/responses": ("input", "max_output_tokens"), "/v1/completions": ("prompt", "max_tokens"),
}

async def main():
    async with client(256, checked=True) as server:
        async def ask(path, words, answer, stream):
            field, limit = FORMS[path]
            text = "a " * words
            given = text if field == "prompt" else [{"role": "user", "content": text}]
            body = {"model": "kimi-k2.5-tiny", field: given, limit: answer, "stream": stream}
            got = await server.post(path, json=body)
            events = [json.loads(line[6:]) for line in got.text.splitlines() if line[:7] == "data: {"]
            return [got.status_code, events[-1] if events else got.json()]
        return {f"{path} {kind} {stream}": await ask(path, *sizes, stream)
                for path in FORMS for stream in (False, True)
                for kind, sizes in {"long": (600, 8), "both": (20, 250), "fits": (20, 8)}.items()}

print(json.dumps(asyncio.run(main())))
"""
LONG, BOTH_LONG = "prompt is too long: ", "input length and `max_tokens` exceed context limit: "


@BOTH
def test_each_api_says_that_the_prompt_is_too_long(newest: bool) -> None:
    got = found(PROGRAM, newest)
    for asked, (status, answer) in got.items():
        path, kind, stream = asked.split()
        error = answer.get("error") or answer.get("response", {}).get("error")
        if kind == "fits":
            assert (status, error) == (200, None), asked
            continue
        assert error, (asked, status, answer)
        assert error["message"].startswith(LONG if kind == "long" else BOTH_LONG), asked
        assert "> 25" in error["message"], asked
        if path == "/v1/messages":
            assert (status, answer["type"], error["type"]) == (400, "error", "invalid_request_error"), asked
        else:
            assert error["code"] == "context_length_exceeded", asked
            assert status == (200 if (path, stream) == ("/v1/responses", "True") else 400), asked

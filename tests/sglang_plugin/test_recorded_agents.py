"""Recorded requests of real agents pass the door and SGLang's own endpoints; only the engine behind them is missing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support import recorded
from support.sglang_program import BOTH, found

ANSWER = "<|im_assistant|>assistant<|im_middle|>"
CONTEXT = 262144  # Kimi's: the built-in tokenizer makes more tokens than the one that the clients counted with
PROGRAM = """
import asyncio, json
from support import recorded
from support.engineless import client, prompts, text_of

async def main():
    async with client(%d) as server:
        async def ask(number, row):
            answer = await server.post(row["path"], json=row["body"], headers={"x-number": str(number)})
            prompt = text_of(prompts.get(str(number), []))
            return [answer.status_code, answer.text[-300:], prompt.count(%r)]
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

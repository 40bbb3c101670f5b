"""Chat requests that are sampled, seeded and penalized, and all that a server answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from kimi_w4a8_eagle3.base.http import Address, bearer

# Questions whose greedy answer a frequency penalty changes.
QUESTIONS = [
    "Omar walks 3 miles a day for 2 days. The trip is 46 miles long. How many miles are left?",
    "Ruth has 31 balls. Ruth sells 16. Then Ruth loses 7. How many balls does Ruth have now?",
]
DIGITS = dict.fromkeys(map(str, range(34, 44)), 9.0)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "hot": {"temperature": 2.0, "seed": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "top-k and min-p": {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "seed": 4},
    "negative seed": {"temperature": 1.5, "seed": -(2**40)},
    "min_tokens": {"temperature": 0, "min_tokens": 40},
    "frequency": {"temperature": 0, "frequency_penalty": 2.0},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "all penalties": {
        "temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.1,
        "min_tokens": 30,
    },
    # The bias is added after the penalty.
    "bias": {"temperature": 1.5, "seed": 6, "repetition_penalty": 1.5, "logit_bias": {"200": -5.0, **DIGITS}},
    "stop string": {"temperature": 1.5, "seed": 7, "stop": ["th"], "frequency_penalty": 0.5},
    "choices": {"temperature": 1.8, "seed": 8, "n": 3, "presence_penalty": 0.5},
    "schema": {
        "temperature": 1.5, "seed": 9, "frequency_penalty": 0.4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}}},
        },
    },
}  # fmt: skip
BODIES = [
    {"messages": [{"role": "user", "content": question}], **params}
    for params in REQUESTS.values()
    for question in QUESTIONS
]


def answers(at: Address, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[list[tuple[Any, ...]]]:
    """Text, calls, end and tokens of every choice of every answer, from a gateway or an engine."""

    def answer(body: dict[str, Any]) -> list[tuple[Any, ...]]:
        asked = {"model": "kimi-k2.5-tiny", "max_tokens": 48, "logprobs": True, **body}
        reply = client.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return [
            (message.get("reasoning_content"), message["content"], choice["finish_reason"], tokens(choice))
            for choice in reply.json()["choices"]
            for message in [choice["message"]]
        ]

    headers = bearer(at.key)
    with httpx.Client(base_url=at.url, headers=headers, timeout=200) as client, ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, bodies))


def tokens(choice: dict[str, Any]) -> tuple[str, ...]:
    return tuple(place["token"] for place in choice["logprobs"]["content"])

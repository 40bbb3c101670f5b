"""The recorded chat sessions as traces in AgentX's and in Mooncake's form, with the lengths of the built-in model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kimi_w4a8_lab.speed.trace_readers import MOONCAKE_BLOCK
from kimi_w4a8_laptop import tiny

_BLOCK = 64  # of AgentX: most prompts here are shorter than 512 tokens
_MOST = 4096  # tokens of a prompt: longer ones take a CPU minutes
_LAST = 16  # tokens of an answer that no later request holds as it was
_LEAST = 4  # that `bench replay` takes
_WAIT_S = 0.5  # before the next turn: the recordings have no times


def write_traces(rows: Iterable[dict[str, Any]], folder: Path) -> tuple[int, int]:
    """Write agentx.jsonl and mooncake.jsonl; returns the number of sessions and of requests in each."""
    tokenizer = AutoTokenizer.from_pretrained(str(tiny.target_path()))
    sessions: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["path"] == "/v1/chat/completions":
            sessions[row["session"]].append(row["body"])
    agentx, mooncake, count = [], [], 0
    for number, (name, bodies) in enumerate(sorted(sessions.items())):
        prompts = [_tokens(tokenizer, body, body["messages"], True) for body in bodies]
        if max(map(len, prompts)) > _MOST:
            continue
        outputs = [_answer(tokenizer, *turn) for turn in zip(bodies, [*bodies[1:], None], prompts, strict=True)]
        turns = [
            {"t": float(at), "type": "n", "in": len(prompt), "out": out, "think_time": _WAIT_S if at else 0.0}
            | {"hash_ids": _ids(prompt, _BLOCK)}
            for at, (prompt, out) in enumerate(zip(prompts, outputs, strict=True))
        ]
        agentx.append({"id": name, "block_size": _BLOCK, "hash_id_scope": "global", "requests": turns})
        for at, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
            when = {"delay": _WAIT_S * 1000} if at else {"timestamp": number * 1000}
            row = {"session_id": name, "input_length": len(prompt), "output_length": out, **when}
            mooncake.append({**row, "hash_ids": _ids(prompt, MOONCAKE_BLOCK)})
        count += len(prompts)
    for file, written in (("agentx", agentx), ("mooncake", mooncake)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return len(agentx), count


def _tokens(tokenizer: Any, body: dict[str, Any], messages: Sequence[Any], ask: bool) -> list[int]:
    tools, template = body.get("tools"), tokenizer.apply_chat_template
    return list(template(messages, tools=tools, add_generation_prompt=ask, return_dict=False))


def _answer(tokenizer: Any, body: dict[str, Any], later: dict[str, Any] | None, prompt: list[int]) -> int:
    """Return the length of an answer as the next request sends it back."""
    messages = later["messages"] if later else []
    at = len(body["messages"])
    if len(messages) <= at or messages[at]["role"] != "assistant":
        return _LAST
    length = len(_tokens(tokenizer, body, messages[: at + 1], False)) - len(prompt)
    return length if length >= _LEAST else _LAST


def _ids(prompt: Sequence[int], block: int) -> list[int]:
    """Return an id for each block, which stands for the block and all before it."""
    ends = range(block, len(prompt) + block, block)
    return [int(sha256(str(list(prompt[:end])).encode()).hexdigest()[:12], 16) for end in ends]

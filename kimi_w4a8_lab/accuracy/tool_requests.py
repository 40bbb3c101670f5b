"""Requests of `eval tools`: from a file, from the Hub, or from the built-in model's problems.

A line of a file has one of three forms: a request body, as in the samples of the K2 Vendor Verifier; that program's
output, which also names the finish reason of another deployment's answer; or `messages` and `tools` as JSON strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.base import calculator
from kimi_w4a8_eagle3.base.errors import KimiError

from ..base.data_file import data_file, lines
from .problems import MathProblem, problems

_INSTEAD = "download it elsewhere and name the file with --data"
_EXPECTED = ("finish_reason", "official_finish_reason")
_OPERATION = re.compile(r"(\d+ [-+*/] \d+) = -?\d+")
_SEED, _BUILTIN = 31, 200


@dataclass(frozen=True)
class ToolRequest:
    """One request. expected: finish_reason of the reference's answer, None if the data has none."""

    body: dict[str, Any]
    expected: str | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self.body.get("tools") or []

    @property
    def identity(self) -> str:
        """Hash of conversation and tools, independent of the model and of sampling parameters."""
        asked = [self.body["messages"], self.tools]
        return sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def load(data: str | None, limit: int | None) -> list[ToolRequest]:
    """Load the first `limit` requests of `data`, a file or `hf://datasets/OWNER/REPO/FILE`.

    Without data it loads built-in problems, 200 unless limited; without a limit it loads a whole file. Raises KimiError
    for an unreadable file or a line that is not a request.
    """
    if data is None:
        return builtin(limit or _BUILTIN)
    path = data_file(data, _INSTEAD)
    expected = "a JSONL file, one request per line"
    found = lines(path, "the requests", expected)
    rows = [(number, line) for number, line in enumerate(found, start=1) if line.strip()]
    if not rows:
        raise KimiError("the file has no request", str(path), expected)
    return [_read(path, number, line) for number, line in rows[:limit]]


def _read(path: Path, number: int, line: str) -> ToolRequest:
    try:
        row = json.loads(line)
        body = row.get("request", row)
        if isinstance(body["messages"], str):
            body = {name: json.loads(body[name]) for name in ("messages", "tools") if body.get(name)}
        body = {name: value for name, value in body.items() if name not in _EXPECTED}
        # The vendor's samples call the system role `_input`; its verifier sends it as `system`.
        body["messages"] = [{**m, "role": "system"} if m["role"] == "_input" else m for m in body["messages"]]
        return ToolRequest(body, next((row[name] for name in _EXPECTED if row.get(name)), None))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise KimiError(
            f"line {number} is not a request: {error!r}", str(path), '{"messages": [...], "tools": [...]}'
        ) from None


def builtin(count: int) -> list[ToolRequest]:
    """Make requests from held-out problems with a calculator: one before the first call, one after the last result."""
    found = (request for problem in problems(-(-count // 2), _SEED) for request in _stages(problem))
    return [request for request, _ in zip(found, range(count), strict=False)]


def _stages(problem: MathProblem) -> Iterator[ToolRequest]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    body: dict[str, Any] = {"tools": [calculator.declaration()], "temperature": 0, "max_tokens": 256}
    yield ToolRequest({**body, "messages": list(messages)}, "tool_calls")
    for index, expression in enumerate(_OPERATION.findall(problem.solution)):
        function = {"name": calculator.NAME, "arguments": json.dumps({"expression": expression})}
        call = {"id": f"functions.{calculator.NAME}:{index}", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "name": calculator.NAME}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({**result, "content": calculator.calculate(str(function["arguments"]))})
    yield ToolRequest({**body, "messages": messages}, "stop")

"""What `eval tools` asks: requests with tools, from a file, from the Hub, or of the built-in model's problems.

A line of a file is a request's body, as the samples of the K2 Vendor Verifier are; or what that program writes about
one, which tells how another deployment's answer ended; or the form with `messages` and `tools` as strings of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import tiny
from ..base.errors import KimiError
from ..base.files import lines
from ..fetch.data_file import data_file
from ..tiny import tools

_INSTEAD = "download it elsewhere and name the file with --data"
_EXPECTED = ("finish_reason", "official_finish_reason")
_OPERATION = re.compile(r"(\d+ [-+*/] \d+) = -?\d+")
_SEED, _BUILTIN = 31, 200


@dataclass(frozen=True)
class ToolRequest:
    """One request. expected: the finish_reason of the reference's answer, None where the data has none."""

    body: dict[str, Any]
    expected: str | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The declared tools."""
        return self.body.get("tools") or []

    @property
    def identity(self) -> str:
        """The same for the same conversation and tools, whatever model is asked and how."""
        asked = [self.body["messages"], self.tools]
        return sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def load(data: str | None, limit: int | None) -> list[ToolRequest]:
    """The first `limit` requests of `data`, a file or `hf://datasets/OWNER/REPO/FILE`; None: of the built-in problems.

    Without a limit all of a file, or 200 of the built-in ones. Raises KimiError for a file that cannot be
    read and for a line that is not a request.
    """
    if data is None:
        return builtin(limit or _BUILTIN)
    path = data_file(data, _INSTEAD)
    try:
        rows = [(number, line) for number, line in enumerate(lines(path), start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise KimiError(f"the requests cannot be read: {what}", str(path), "a JSONL file, one request a line") from None
    if not rows:
        raise KimiError("no request", str(path), "a JSONL file, one request a line")
    return [_read(path, number, line) for number, line in rows[:limit]]


def _read(path: Path, number: int, line: str) -> ToolRequest:
    try:
        row = json.loads(line)
        body = row.get("request", row)
        if isinstance(body["messages"], str):
            body = {name: json.loads(body[name]) for name in ("messages", "tools") if body.get(name)}
        body = {name: value for name, value in body.items() if name not in _EXPECTED}
        # The vendor's samples name the system prompt's role so; its verifier sends it as `system`.
        body["messages"] = [{**m, "role": "system"} if m["role"] == "_input" else m for m in body["messages"]]
        return ToolRequest(body, next((row[name] for name in _EXPECTED if row.get(name)), None))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise KimiError(
            f"line {number} is not a request: {error!r}", str(path), '{"messages": [...], "tools": [...]}'
        ) from None


def builtin(count: int) -> list[ToolRequest]:
    """Held-out problems with a calculator: before the first call, where one is due, and after the last result."""
    found = (request for problem in tiny.problems("held_out", count, seed=_SEED) for request in _stages(problem))
    return [request for request, _ in zip(found, range(count), strict=False)]


def _stages(problem: tiny.Problem) -> Iterator[ToolRequest]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    body: dict[str, Any] = {"tools": [tools.declaration()], "temperature": 0, "max_tokens": 256}
    yield ToolRequest({**body, "messages": list(messages)}, "tool_calls")
    for index, expression in enumerate(_OPERATION.findall(problem.solution)):
        function = {"name": tools.NAME, "arguments": json.dumps({"expression": expression})}
        call = {"id": f"functions.{tools.NAME}:{index}", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "name": tools.NAME}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({**result, "content": tools.calculate(str(function["arguments"]))})
    yield ToolRequest({**body, "messages": messages}, "stop")

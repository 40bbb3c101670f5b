"""Readers of trace files: SGLang's `agentic-trace`, AgentX, Mooncake, recorded requests, and raw files of our own runs.

| format | one file is | times | identity of prompts |
|---|---|---|---|
| agentic-trace | JSON with `conversations`, each a list of turns with their new `messages` | none: turns follow at once | text of the messages |
| AgentX | JSON of one conversation, a `.jsonl` or folder of them | think time by turn | `hash_ids` of `block_size` tokens |
| Mooncake | `.jsonl` with one request a line | `timestamp` in ms | `hash_ids` of 512 tokens |
| requests | `.jsonl` or `.jsonl.xz` with `session`, `path` and `body` of one request a line | none | the bodies, without lengths |
| run | the generator's `.jsonl` in a folder of `kimi-w4a8 bench`, or that folder | none: a closed loop | order of turns, `cached_tokens` |
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import regular

from ..base.experiment import first_error
from .generator import LoadDetails
from .trace import Request, Segment, Trace, TraceSession, Turn

FORMATS = "SGLang's agentic-trace, AgentX, Mooncake, recorded requests, or a run of `kimi-w4a8 bench`"
MOONCAKE_BLOCK = 512
OUTPUT_TOKENS = 220  # SGLang's default for agentic-trace, whose files have no output lengths

PositiveInt = Annotated[int, Field(gt=0)]
Time = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]  # a float has no milliseconds beyond
Content = TypeVar("Content", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _AgenticTurn(_Strict):
    messages: list[dict[str, Any]]
    prompt_tokens: PositiveInt | None = None


class _AgenticTrace(_Strict):
    conversations: list[list[_AgenticTurn]] = Field(min_length=1)
    metadata: dict[str, Any] = {}


class _AgentXRequest(_Strict):
    t: Time
    type: Literal["n", "s"]
    model: str = ""
    prompt: PositiveInt = Field(alias="in")
    output: Annotated[int, Field(ge=0)] = Field(alias="out")
    hash_ids: list[int] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None


class _AgentXSubagent(_Strict):
    t: Time
    type: Literal["subagent"]
    requests: list[_AgentXRequest]
    agent_id: str = "subagent"
    subagent_type: str = ""
    duration_ms: float | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    status: str = ""
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0


class _AgentXTrace(_Strict):
    id: str
    block_size: PositiveInt
    requests: list[_AgentXRequest | _AgentXSubagent] = Field(min_length=1)
    hash_id_scope: Literal["local", "global"] = "local"
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: dict[str, Any] | None = None


class _MooncakeRow(_Strict):
    input_length: PositiveInt
    output_length: PositiveInt
    timestamp: Time | None = None
    delay: Time | None = None
    session_id: str | int | None = None
    hash_ids: list[int | str] = []


class _RequestRow(_Strict):
    session: str
    path: Literal["/v1/chat/completions", "/v1/responses", "/v1/messages"]
    body: dict[str, Any]


def read_trace(path: Path, output_tokens: int = OUTPUT_TOKENS) -> Trace:
    """Read a trace file or folder; output_tokens: of each answer, where the format has no output lengths.

    Raises KimiError for an unreadable file, another format, an unknown field, and missing times or lengths.
    """
    if path.is_dir():
        return _folder(path, output_tokens)
    rows = _rows(path)
    first = rows[0] if isinstance(rows[0], dict) else {}
    if "conversations" in first and len(rows) == 1:
        assumed = f"The trace has no lengths of answers: {output_tokens} tokens each are assumed."
        sessions = _agentic(_checked(_AgenticTrace, first, path), output_tokens)
        return Trace(str(path), "agentic-trace", sessions, assumed=assumed)
    if "requests" in first:
        found = [_checked(_AgentXTrace, row, path, number) for number, row in enumerate(rows, 1)]
        return Trace(str(path), "AgentX", tuple(_agentx(one) for one in found))
    if "input_lens" in first:
        return _own_run(path, rows[-1])
    if first.keys() == _RequestRow.model_fields.keys():
        return Trace(
            str(path), "requests", _requests([_checked(_RequestRow, row, path, at) for at, row in enumerate(rows, 1)])
        )
    if first.keys() & _MooncakeRow.model_fields.keys():
        found_rows = [_checked(_MooncakeRow, row, path, number) for number, row in enumerate(rows, 1)]
        return Trace(str(path), "Mooncake", _mooncake(found_rows, path))
    raise KimiError("this is no trace of a known format", where=str(path), expected=FORMATS)


def _folder(path: Path, output_tokens: int) -> Trace:
    if (path / "result.json").is_file():
        raw = sorted(file for file in path.glob("*.jsonl") if '"input_lens"' in file.read_text())
        if len(raw) == 1:
            return read_trace(raw[0], output_tokens)
        raise KimiError(
            f"the run has {len(raw)} measurements, and a trace is one",
            where=str(path),
            expected="one file: " + ", ".join(file.name for file in raw[:4]) if raw else "a finished measurement",
        )
    files = sorted(path.glob("*.json*"))
    traces = [read_trace(file, output_tokens) for file in files]
    formats = {trace.format for trace in traces}
    if formats != {"AgentX"}:
        what = f"a folder of {', '.join(sorted(formats))} traces" if traces else "no trace in the folder"
        raise KimiError(what, where=str(path), expected="AgentX conversations, one a file, or one file")
    return Trace(str(path), "AgentX", tuple(session for trace in traces for session in trace.sessions))


def _rows(path: Path) -> list[Any]:
    """Return the objects of a JSON file, or of a file with one a line."""
    try:
        data = regular(path).read_bytes()
        content = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KimiError(f"cannot read the trace: {reason}", where=str(path), expected=FORMATS) from None
    with suppress(ValueError, RecursionError):  # several objects, one a line
        return [json.loads(content)]
    rows = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would split at U+2028 within a text
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise KimiError(f"not valid JSON: {error}", where=f"{path}, line {number}", expected=FORMATS) from None
    if not rows:
        raise KimiError("the trace is empty", where=str(path), expected=FORMATS)
    return rows


def _checked(kind: type[Content], row: Any, path: Path, number: int = 0) -> Content:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        schema = kind.model_json_schema()
        valid = [name for part in (schema, *schema.get("$defs", {}).values()) for name in part["properties"]]
        where = f"{path}, line {number}" if number else str(path)
        raise KimiError(first_error(error, valid), where, FORMATS) from None


# Turns repeat the blocks of the turns before: one object each, because an hour of agents has millions.
_block = lru_cache(maxsize=2**18)(Segment)


def _blocks(prefix: str, ids: Sequence[int | str], block: int, tokens: int, rest: str) -> tuple[Segment, ...]:
    """Return segments of `block` tokens for the ids, the last one shorter; tokens without an id are found nowhere else.

    A partial block is another content than the same id's full block, because a cache cannot tell that they are equal.
    """
    full, partial = divmod(tokens, block)
    found = [_block(f"{prefix}{name}", block) for name in ids[:full]]
    left = tokens - block * len(found)
    if left and len(ids) > full and left == partial:
        found.append(Segment(f"{prefix}{ids[full]}", left))
    elif left:
        found.append(Segment(rest, left))
    return tuple(found)


def _agentic(trace: _AgenticTrace, output_tokens: int) -> tuple[TraceSession, ...]:
    sessions = []
    for number, conversation in enumerate(trace.conversations):
        turns: list[Turn] = []
        for at, turn in enumerate(turn for turn in conversation if turn.messages):
            before = turns[-1] if turns else None
            prompt = () if turn.prompt_tokens is None else _messages(turn.messages, turn.prompt_tokens, before)
            answer = f"answer {number}.{at}"
            turns.append(Turn(prompt, output_tokens, answer=answer, messages=tuple(turn.messages)))
        if turns:
            sessions.append(TraceSession(f"conversation {number}", tuple(turns)))
    return tuple(sessions)


def _messages(messages: Sequence[Mapping[str, Any]], tokens: int, before: Turn | None) -> tuple[Segment, ...]:
    """Return the prompt of `tokens`: that of the turn before, its answer, and the new messages by their text."""
    prompt = list(_continued(before, tokens)) if before else []
    left = tokens - sum(segment.tokens for segment in prompt)
    texts = [json.dumps(message, sort_keys=True) for message in messages]
    for at, text in enumerate(texts):
        share = left if at == len(texts) - 1 else left * len(text) // sum(map(len, texts[at:]))
        if share:
            prompt.append(Segment(hashlib.sha256(text.encode()).hexdigest()[:16], share))
        left -= share
    return tuple(prompt)


def _continued(before: Turn, tokens: int) -> Iterable[Segment]:
    """Yield what the next prompt of `tokens` has of a turn: its prompt and its answer, leaving at least one token."""
    left = tokens - 1
    answer = () if before.answer is None else (Segment(before.answer, before.output_tokens),)
    for segment in (*before.prompt, *answer):
        if segment.tokens > left:
            return
        left -= segment.tokens
        yield segment


def _agentx(trace: _AgentXTrace) -> TraceSession:
    prefix = f"{trace.id}/" if trace.hash_id_scope == "local" else ""

    def session(name: str, requests: Sequence[_AgentXRequest], start_s: float | None) -> TraceSession:
        turns = []
        for at, request in enumerate(requests):
            last = requests[at - 1] if at else None
            think = request.think_time
            if think is None:
                think = request.t - last.t - (last.api_time or 0.0) if last else 0.0
            rest = f"{name}, rest of turn {at}"
            prompt = _blocks(prefix, request.hash_ids, trace.block_size, request.prompt, rest)
            turns.append(Turn(prompt, max(request.output, 1), max(think, 0.0)))
        return TraceSession(name, tuple(turns), start_s)

    own = [request for request in trace.requests if isinstance(request, _AgentXRequest)]
    subagents = []
    for marker in trace.requests:
        if isinstance(marker, _AgentXSubagent) and marker.requests:
            first = marker.requests[0].t  # after the trace's start, or in raw captures after the marker
            start = first if first >= marker.t else marker.t + first
            subagents.append(session(f"{trace.id}/{marker.agent_id}", marker.requests, start))
    root = session(trace.id, own, None)
    return TraceSession(root.name, root.turns, None, tuple(subagents))


def _mooncake(rows: Sequence[_MooncakeRow], path: Path) -> tuple[TraceSession, ...]:
    sessions: dict[str, list[tuple[int, _MooncakeRow]]] = {}
    latest: dict[object, float] = {}  # time of each session's last row, and of the last one without a session
    for number, row in enumerate(rows, 1):
        if row.timestamp is not None and row.timestamp < latest.get(row.session_id, row.timestamp):
            raise KimiError(
                "the row is earlier than the one before it",
                where=f"{path}, line {number}",
                expected=f"rows in the order of their times, here {latest[row.session_id]:g} or more",
            )
        latest[row.session_id] = latest.get(row.session_id, 0.0) if row.timestamp is None else row.timestamp
        sessions.setdefault(f"request {number}" if row.session_id is None else str(row.session_id), []).append(
            (number, row)
        )
    found = []
    for name, members in sessions.items():
        turns: list[Turn] = []
        for at, (number, row) in enumerate(members):
            known = row.timestamp if at == 0 else row.delay if row.delay is not None else row.timestamp
            if known is None:
                raise KimiError(
                    "the trace does not say when a request is sent",
                    where=f"{path}, line {number}",
                    expected='"timestamp" in milliseconds, or "delay" after the first request of a session',
                )
            if len(row.hash_ids) > -(-row.input_length // MOONCAKE_BLOCK):
                raise KimiError(
                    f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens",
                    where=f"{path}, line {number}",
                    expected=f"one for each {MOONCAKE_BLOCK} tokens",
                )
            think = row.delay if row.delay is not None else known - (members[at - 1][1].timestamp or 0.0) if at else 0
            prompt = _blocks("", row.hash_ids, MOONCAKE_BLOCK, row.input_length, f"rest of line {number}")
            turns.append(Turn(prompt, row.output_length, max(think, 0.0) / 1000))
        found.append(TraceSession(name, tuple(turns), (members[0][1].timestamp or 0.0) / 1000))
    start = min(session.start_s or 0.0 for session in found)
    return tuple(TraceSession(one.name, one.turns, (one.start_s or 0.0) - start) for one in found)


def _requests(rows: Sequence[_RequestRow]) -> tuple[TraceSession, ...]:
    """Return recorded requests as sessions. Their limits of tokens stay in them, and their lengths are unknown."""
    sessions: dict[str, list[Turn]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(Turn((), 1, request=Request(row.path, row.body)))
    return tuple(TraceSession(name, tuple(turns)) for name, turns in sessions.items())


def _own_run(path: Path, row: dict[str, Any]) -> Trace:
    """Read a raw file of a run; result.json beside it has the number of turns and of users."""
    try:
        details = LoadDetails.model_validate(row)
        result = json.loads((path.parent / "result.json").read_text())
        of_file = next(found for found in result["measurements"] if found["raw"] == path.name)
        count, users = int(of_file["workload"]["turns"]), int(of_file["concurrency"])
    except (OSError, ValueError, StopIteration, KeyError, TypeError):
        raise KimiError(
            "a run's raw file is read in its folder, with result.json beside it",
            where=str(path),
            expected="a run directory of `kimi-w4a8 bench`",
        ) from None
    # A new conversation finds only what all share, the system prompt.
    shared = max(details.cached_tokens[::count], default=0) if count > 1 else 0
    sessions = []
    for number, start in enumerate(range(0, len(details.input_lens), count)):
        turns: list[Turn] = []
        for at in range(start, start + count):
            tokens, system = details.input_lens[at], Segment("system", shared)
            before = turns[-1] if turns else Turn((system,) if shared else (), 0)
            prompt = tuple(_continued(before, tokens))
            new = Segment(f"request {at}", tokens - sum(segment.tokens for segment in prompt))
            turns.append(Turn((*prompt, new), max(details.output_lens[at], 1), answer=f"answer {at}"))
        sessions.append(TraceSession(f"user {number}", tuple(turns)))
    return Trace(str(path), "run", tuple(sessions), users)

"""Traces of every format become sessions with shared segments; wrong files give one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.speed.trace import Segment, Trace
from kimi_w4a8_lab.speed.trace_readers import read_trace

REQUEST = {"t": 0.0, "type": "s", "model": "m", "in": 150, "out": 9, "hash_ids": [1, 2], "think_time": 0.5}
AGENTX = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [REQUEST]}
ROW = {"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
SYSTEM = {"role": "system", "content": "be short"}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8-sig")
    return path


def prompts(trace: Trace, session: int = 0) -> list[tuple[Segment, ...]]:
    return [turn.prompt for turn in trace.sessions[session].turns]


def test_agentic_trace_shares_the_system_prompt_and_the_answers(tmp_path: Path) -> None:
    def conversation(*texts: str) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": text} for text in texts]
        return [
            {"messages": [SYSTEM, messages[0]], "prompt_tokens": 30},
            {"messages": [messages[1]], "prompt_tokens": 60},
        ]

    file = written(tmp_path / "t.json", {"conversations": [conversation("a b", "c"), conversation("d e", "c")]})
    trace = read_trace(file, output_tokens=20)
    (first, second), (other, _) = prompts(trace, 0), prompts(trace, 1)
    assert (trace.format, trace.timed, trace.users) == ("agentic-trace", False, None)
    assert [turn.prompt_tokens for turn in trace.turns()] == [30, 60, 30, 60]
    assert first[0] == other[0] and first[1] != other[1]  # the same system prompt before another question
    assert second == (*first, Segment("answer 0.0", 20), second[3]) and second[3].tokens == 10
    assert trace.sessions[0].turns[0].messages == (SYSTEM, {"role": "user", "content": "a b"})


def test_agentic_trace_without_prompt_tokens_has_text_but_no_lengths(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t.json", {"conversations": [[{"messages": [SYSTEM]}]]}))
    assert [turn.prompt for turn in trace.turns()] == [()]
    with pytest.raises(KimiError, match="without a length"):
        trace.require_lengths()


def test_a_line_separator_within_a_text_does_not_end_a_line(tmp_path: Path) -> None:
    """JSON allows U+2028 within a string, unescaped; `str.splitlines` ends a line there."""
    rows = [{"session": "a", "path": "/v1/chat/completions", "body": {"text": "one\u2028two"}}] * 2
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert len(list(read_trace(file).turns())) == 2


def test_agentx_has_blocks_think_times_and_subagents(tmp_path: Path) -> None:
    later = {**REQUEST, "t": 20.0, "in": 192, "hash_ids": [1, 2, 5], "think_time": None, "api_time": None}
    inner = {"t": 3.0, "type": "subagent", "agent_id": "x", "requests": [{**REQUEST, "t": 4.0}]}
    raw = {"t": 9.0, "type": "subagent", "agent_id": "y", "requests": [REQUEST]}  # after the marker, not the start
    file = written(tmp_path / "t.json", {**AGENTX, "requests": [{**REQUEST, "api_time": 8.0}, inner, raw, later]})
    (session,) = read_trace(file).sessions
    assert session.turns[0].prompt == (Segment("a/1", 64), Segment("a/2", 64), Segment("a, rest of turn 0", 22))
    assert session.turns[1].prompt == (Segment("a/1", 64), Segment("a/2", 64), Segment("a/5", 64))
    assert [turn.think_s for turn in session.turns] == [0.5, 12.0]
    assert [(found.name, found.start_s) for found in session.walk()] == [("a", None), ("a/x", 4.0), ("a/y", 9.0)]


def test_agentx_folder_and_lines_are_several_conversations(tmp_path: Path) -> None:
    for name in "ab":
        written(tmp_path / f"{name}.json", {**AGENTX, "id": name})
    assert [session.name for session in read_trace(tmp_path).sessions] == ["a", "b"]
    lines = written(tmp_path / "all.jsonl", {**AGENTX, "id": "c"}, {**AGENTX, "id": "d", "hash_id_scope": "global"})
    assert [turn.prompt[0].content for turn in read_trace(lines).turns()] == ["c/1", "1"]


def test_mooncake_rows_are_sessions_with_times(tmp_path: Path) -> None:
    rows = [{**ROW, "session_id": 7}, {**ROW, "timestamp": 1500}, {**ROW, "session_id": 7, "delay": 250}]
    trace = read_trace(written(tmp_path / "t.jsonl", *rows))
    assert (trace.format, trace.timed) == ("Mooncake", True)
    assert [(session.start_s, len(session.turns)) for session in trace.sessions] == [(0.0, 2), (0.5, 1)]
    assert prompts(trace)[0] == (Segment("0", 512), Segment("1", 188))
    assert trace.sessions[0].turns[1].think_s == 0.25


def test_a_run_of_conversations_shares_what_it_measured(tmp_path: Path) -> None:
    raw = {"input_lens": [50, 90, 50, 90], "output_lens": [10] * 4, "cached_tokens": [0, 60, 30, 60]}
    row = {**raw, "ttfts": [0.1] * 4, "itls": [[]] * 4, "generated_texts": [""] * 4, "errors": [""] * 4}
    file = written(tmp_path / "raw.jsonl", row)
    measurement = {"raw": "raw.jsonl", "workload": {"turns": 2}, "concurrency": 3}
    (tmp_path / "result.json").write_text(json.dumps({"measurements": [measurement]}))
    trace = read_trace(file)
    (first, second), (other, _) = prompts(trace, 0), prompts(trace, 1)
    assert first[0] == other[0] == Segment("system", 30) and first[1] != other[1]
    assert second == (*first, Segment("answer 0", 10), Segment("request 1", 30))
    assert trace.users == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{**ROW, "hash_idz": []}], "unknown field 'hash_idz'; did you mean 'hash_ids'?"),
        ([{**AGENTX, "requests": [{**REQUEST, "api_tim": 1}]}], "did you mean 'api_time'?"),
        ([{key: ROW[key] for key in ("input_length", "output_length")}], "does not say when a request is sent"),
        ([{**ROW, "timestamp": 9}, {**ROW, "timestamp": 8}], "earlier than the one before it"),
        ([ROW, {"timestamp": 5, "output_length": 3}], "input_length: Field required"),
        ([{**ROW, "hash_ids": [1, 2, 3]}], "3 hash_ids for 700 tokens"),
        ([{**ROW, "timestamp": -1}], "greater than or equal to 0"),
        ([{"conversations": []}], "at least 1 item"),
        ([{"prompt": "hello"}], "no trace of a known format"),
        ([[1, 2]], "no trace of a known format"),
        ([{"input_lens": [3]}], "result.json"),
        ([ROW, "{"], "should be a valid dictionary"),
    ],
)
def test_a_wrong_trace_gives_one_message(rows: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(KimiError) as caught:
        read_trace(written(tmp_path / "t.jsonl", *rows))
    assert said in str(caught.value)


def test_a_cut_or_empty_trace_gives_one_message(tmp_path: Path) -> None:
    cut = json.dumps(ROW) + '\n{"timestamp"'
    for text, said in ((cut, "not valid JSON"), ("9" * 5_000, "not valid JSON: Exceeds the limit"), ("", "empty")):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(KimiError, match=said):
            read_trace(tmp_path / "t.jsonl")

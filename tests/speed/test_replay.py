"""A replay: what is sent and when, the same text for the same content, and figures by turn."""

import asyncio
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.null_server import null_server
from support.scripted_server import scripted_server, streamed
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.speed.generator import LoadDetails
from kimi_w4a8_lab.speed.measure import turns_of
from kimi_w4a8_lab.speed.replay import Replay, selected
from kimi_w4a8_lab.speed.runs import read_run
from kimi_w4a8_lab.speed.sent_turns import Recorded, Sender, Sent, TextMaker, count_tokens, text_of
from kimi_w4a8_lab.speed.trace import Trace
from kimi_w4a8_lab.speed.trace_readers import read_trace
from kimi_w4a8_laptop import tiny

CALL = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}


def _request(at: float, blocks: list[int], output: int, think: float | None = None) -> dict[str, Any]:
    made = {"t": at, "type": "n", "model": "m", "in": 8 * len(blocks), "out": output, "hash_ids": blocks}
    return made if think is None else {**made, "think_time": think}


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Two AgentX conversations; the first one starts a subagent."""
    helper = {"t": 0.02, "type": "subagent", "agent_id": "helper", "requests": [_request(0.02, [7], 4)]}
    first = [_request(0, [1, 2], 5), helper, _request(1, [1, 2, 3], 6, 0.04), _request(2, [1, 2, 3, 4], 7, 0.0)]
    second = [_request(0, [1, 9], 4), _request(1, [1, 9, 9], 4, 0.02)]
    path = tmp_path / "agents.jsonl"
    rows = [{"id": str(at), "block_size": 8, "requests": made} for at, made in enumerate((first, second))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def texts() -> TextMaker:
    return TextMaker(transformers.AutoTokenizer.from_pretrained(tiny.target_path()))


def test_the_same_content_is_the_same_tokens(texts: TextMaker) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.target_path())
    one, other = texts.text("0/1", 64), texts.text("0/2", 64)
    ids = tokenizer.encode(one + other, add_special_tokens=False)
    assert ids == tokenizer.encode(one, add_special_tokens=False) + tokenizer.encode(other, add_special_tokens=False)
    assert len(ids) == 128 and ids[:64] != ids[64:]
    assert TextMaker(tokenizer).text("0/1", 64) == one


def test_a_session_keeps_the_prefix_of_the_turn_before(agents: Path, tmp_path: Path) -> None:
    played = Replay(read_trace(agents), speed=2.0)
    content = json.loads(played.prepare(played.workload([3]), tmp_path).read_text())["conversations"]
    turns = [[Recorded(**turn["messages"][0]["content"]) for turn in session] for session in content]
    assert [(one[0].parent, len(one)) for one in turns] == [(None, 3), (0, 1), (None, 2)]
    assert [(turn.kept, len(turn.new), turn.wait_s, turn.last) for turn in turns[0]] == [
        (0, 2, 0.0, False), (2, 1, 0.02, False), (3, 1, 0.0, True),
    ]  # fmt: skip
    assert turns[1][0].start_s == 0.01  # a subagent starts after its parent, at twice the speed


def test_what_does_not_fit_is_cut_and_nothing_left_is_an_error(agents: Path) -> None:
    trace = read_trace(agents)
    short = selected(trace, sessions=1, context_len=30)
    assert [len(session.turns) for session in short.sessions] == [2] and len(short.sessions[0].subagents) == 1
    with pytest.raises(KimiError, match="no session of the trace fits"):
        selected(trace, None, 10)


def test_a_replay_measures_every_session_by_turn(agents: Path, tmp_path: Path) -> None:
    with null_server() as url:
        words = ["bench", "replay", str(agents), "--base-url", url, "--users", "2", "--runs", str(tmp_path / "runs")]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = read_run(next((tmp_path / "runs").iterdir()))
    (found,) = run.result.measurements
    assert found.load.completed == 6 and found.load.total_output_tokens == 30 and found.problems == []
    assert [turn.label for turn in found.turns] == ["1", "2", "3"]
    sent = [json.loads(line) for line in (run.folder / found.raw).with_suffix(".requests").read_text().splitlines()]
    at = {(one["session"], one["turn"]): one for one in sent}
    assert set(at) == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)}
    # of 40 and 20 ms; libuv counts a pause from when its loop woke, so it ends a little earlier
    assert at[0, 1]["sent_s"] > at[0, 0]["ended_s"] + 0.02 and at[1, 0]["sent_s"] > at[0, 0]["sent_s"] + 0.01
    assert [at[0, turn]["prompt_tokens"] for turn in range(3)] == [16, 24, 32]  # the null server counts words
    assert (run.folder / "report/turns.svg").is_file()
    assert "in the first turn" in (run.folder / "report/report.html").read_text()
    assert "E2E interactivity P90" in done.output


def test_users_limit_sessions_and_not_their_subagents() -> None:
    """With one user the second session waits for the end of the first one, and the subagent does not."""
    order: list[tuple[int, int]] = []

    class Recording(Sender):
        async def _answer(self, path: str, body: dict[str, Any], sent: Sent) -> None:
            order.append((sent.session, sent.turn))
            await asyncio.sleep(0.02 * (sent.session == 0))

    async def play() -> None:
        sender = Recording("http://nowhere", "m", 1, {}, TextMaker(None))  # type: ignore[arg-type]
        body: dict[str, Any] = {"body": {"messages": []}, "output_tokens": 4}

        async def session(number: int, count: int, parent: int | None = None) -> None:
            turns = [Recorded(number, at, at == count - 1, parent=parent, **body) for at in range(count)]
            for at in range(count):
                await sender.send(turns[: at + 1])

        await asyncio.gather(session(0, 2), session(1, 1, 0), session(2, 1))

    asyncio.run(play())
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0)]


CHAT = [{"choices": [{"delta": {"content": "one"}}]}, {"choices": [], "usage": {"completion_tokens": 1}}]
RESPONSES = [{"type": "response.output_text.delta", "delta": "one"}]
MESSAGES = [{"type": "content_block_delta", "delta": {"text": "one"}}]
FAILED = {"type": "response.failed", "response": {"error": {"message": "no memory"}}}


@pytest.mark.parametrize(
    ("path", "events", "error"),
    [
        ("/v1/chat/completions", [*CHAT, "[DONE]"], ""),
        ("/v1/responses", [*RESPONSES, {"type": "response.completed", "response": {"error": None}}], ""),
        ("/v1/messages", [*MESSAGES, {"type": "message_stop"}], ""),
        ("/v1/chat/completions", CHAT[:1], "the stream ended without its last line"),
        ("/v1/responses", RESPONSES, "the stream ended without its last line"),
        ("/v1/messages", MESSAGES, "the stream ended without its last line"),
        ("/v1/chat/completions", [*CHAT[:1], {"error": {"message": "no memory"}}], "no memory"),
        ("/v1/responses", [*RESPONSES, FAILED], "no memory"),
    ],
)
def test_a_stream_that_the_server_cut_off_is_a_failed_request(path: str, events: list[Any], error: str) -> None:
    """Its last event is missing, although the connection ended properly."""
    turn = Recorded(0, 0, True, 4, path=path, body={"messages": []})

    async def play(base_url: str) -> Sent:
        return await Sender(base_url, "m", 1, {}, TextMaker(None)).send([turn])  # type: ignore[arg-type]

    with scripted_server(lambda number, body: streamed(events)) as server:
        sent = asyncio.run(play(server.base_url))
    assert sent.ttft > 0 and (error in sent.error if error else not sent.error)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"choices": [{"delta": {"reasoning_content": "a", "content": "b"}}]}, "ab"),
        ({"choices": [{"delta": {"tool_calls": [CALL]}}]}, str(CALL["function"])),
        ({"choices": [], "usage": {}}, ""),
        ({"type": "response.output_text.delta", "delta": "c"}, "c"),
        ({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, "{"),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, ""),
    ],
)
def test_every_kind_of_piece_counts_as_generated(event: dict[str, Any], text: str) -> None:
    assert text_of(event) == text


@pytest.mark.parametrize(
    "event",
    [
        {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}},
        {"response": {"usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}}},
        {"message": {"usage": {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 4}}},
    ],
)
def test_every_api_has_its_counts(event: dict[str, Any]) -> None:
    sent = Sent(0, 0)
    count_tokens(event, sent)
    assert (sent.prompt_tokens, sent.cached_tokens, sent.output_tokens) == (9, 4, 3)


def test_recorded_requests_are_sent_as_they_are(tmp_path: Path) -> None:
    bodies = [{"model": "claude", "messages": [], "max_tokens": 5}, {"model": "claude", "messages": [1]}]
    path = tmp_path / "requests.jsonl.xz"
    rows = [{"session": "claude-code", "path": "/v1/messages", "body": body} for body in bodies]
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    played = Replay(read_trace(path))
    content = json.loads(played.prepare(played.workload([]), tmp_path).read_text())["conversations"]
    recorded = [Recorded(**turn["messages"][0]["content"]) for turn in content[0]]
    assert [one.body for one in recorded] == bodies and {one.path for one in recorded} == {"/v1/messages"}


def test_an_agentic_trace_is_left_to_sglangs_loader(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"conversations": [[{"messages": [{"role": "user", "content": "a"}]}] * 2]}))
    played = Replay(read_trace(path))
    assert isinstance(played.trace, Trace)
    workload = played.workload([2])
    assert played.prepare(workload, tmp_path) == path.resolve() and workload.sessions == [2]
    words = workload.points()[0].arguments(path)
    assert words[words.index("--max-concurrency") + 1] == "2" and "agentic-trace" in words


def test_late_turns_share_rows_and_failed_requests_have_none() -> None:
    numbers = [*range(40), 0]
    details = LoadDetails(
        input_lens=[10] * 41, output_lens=[1] * 41, ttfts=[0.1] * 40 + [9.0], itls=[[]] * 41,
        generated_texts=[""] * 41, errors=[""] * 40 + ["HTTP 500"], cached_tokens=[5] * 41,
    )  # fmt: skip
    found = turns_of(details, numbers)
    assert [one.label for one in found] == [*map(str, range(1, 17)), "17 to 32", "33 to 40"]
    assert found[0].ttft_p99_ms == pytest.approx(100)

"""`eval agent` with a counter as its tool: conversations, what is refused to run, resumption and pairs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.every_page import Shown
from support.scripted_server import Script, scripted_server, whole
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accuracy import agent_run, bfcl
from kimi_w4a8_lab.accuracy.accuracy import load_outcomes
from kimi_w4a8_lab.accuracy.agent_run import SOLVED, AgentPlan, Conversation
from kimi_w4a8_lab.accuracy.bfcl import AgentTask, Bfcl, written
from kimi_w4a8_lab.accuracy.evaluation import RunOptions
from kimi_w4a8_lab.accuracy.recorder import Answer
from kimi_w4a8_lab.base.server_under_test import Target

SILENT = Console(quiet=True)
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


class Counters:
    """Two tasks: add 2, then add 3. A call changes the task's number."""

    def __init__(self) -> None:
        self.numbers = {"task 0": 0, "task 1": 0}

    def tasks(self, category: str, limit: int | None) -> list[AgentTask]:
        said = [[{"role": "user", "content": f"{name}: add {n}"}] for name in ("task",) for n in (2, 3)]
        return [AgentTask(name, said, [[ADD], [ADD]], {}, []) for name in self.numbers][:limit]

    def execute(self, task: AgentTask, calls: Any) -> list[str]:
        for call in calls:
            self.numbers[task.name] += int(call.removeprefix("add(n=").removesuffix(")"))
        return [str(self.numbers[task.name])] * len(calls)

    def problem(self, task: AgentTask, calls: Any) -> str:
        return "" if calls == [[["add(n=2)"]], [["add(n=3)"]]] else "wrong"


def _model(number: int, body: bytes, wrong: str = "") -> Script:
    """Call `add` with the number that the user says, and answer after the tool's result."""
    if not body:
        return whole({"data": [{"id": "m"}]})
    messages = json.loads(body)["messages"]
    last = messages[-1]
    message: dict[str, Any] = {"role": "assistant", "content": "done"}
    if last["role"] == "user":
        given = {"n": int(last["content"].rpartition(" ")[2]) + (1 if wrong else 0)}
        call = {"name": "add", "arguments": json.dumps(given)}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        }
    finish = "tool_calls" if last["role"] == "user" else "stop"
    usage = {"completion_tokens": 5}
    return whole({"choices": [{"index": 0, "finish_reason": finish, "message": message}], "usage": usage})


def _run(runs: Path, answer: Any, resume: Path | None = None, **options: Any) -> tuple[Path, int]:
    with scripted_server(answer) as server:
        target = Target(base_url=server.base_url)
        folder = agent_run.run(target, AgentPlan(), RunOptions(runs=runs, resume=resume, **options), Counters(), SILENT)
        return folder, sum(b"messages" in body for body in server.bodies)


def test_conversations_run_tools_and_resume_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = _run(tmp_path, _model)
    outcomes = load_outcomes(folder)
    assert [(one.question, one.correct, one.status) for one in outcomes] == [
        ("task 0", {SOLVED: True}, "answered"), ("task 1", {SOLVED: True}, "answered"),
    ]  # fmt: skip
    assert asked == 8
    resumed, again = _run(tmp_path, _model, resume=folder)
    assert resumed == folder and again == 0
    assert [replace(one, seconds=0) for one in load_outcomes(folder)] == [replace(one, seconds=0) for one in outcomes]
    monkeypatch.setattr(bfcl, "Bfcl", Counters)
    with scripted_server(_model) as server:
        words = ["eval", "agent", "--resume", str(folder), "--base-url", server.base_url]
        shown = Shown(CliRunner().invoke(app, words).output, tmp_path)
    assert shown.headline.startswith("MEASURED, NOT JUDGED: Conversations with tools, ")
    assert shown.rows[SOLVED,][1] == "2 of 2"


def test_two_servers_are_compared_task_by_task(tmp_path: Path) -> None:
    base, _ = _run(tmp_path, _model)
    folder, _ = _run(tmp_path, lambda number, body: _model(number, body, "wrong"), baseline=base)
    verdict = json.loads((folder / "result.json").read_text())["verdict"]
    (paired,) = verdict["paired"]
    assert (paired["metric"], paired["n"], paired["only_base"]) == (SOLVED, 2, 2)
    with pytest.raises(KimiError, match="the baseline has steps"):
        agent_run.require_same_plan(base, replace(AgentPlan(), steps=3), ("steps",))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("remove", '{"n": 1}', "no tool is named"),
        ("add", '{"n": 1', "Error"),
        ("add", "[1]", "no JSON object"),
        ("add", '{"n=1) or add(n": 1}', "no JSON object"),
    ],
)
def test_only_declared_tools_with_named_arguments_run(name: str, arguments: str, message: str) -> None:
    counters = Counters()
    one = Conversation(counters.tasks("base", 1)[0], [])
    call = {"id": "c", "function": {"name": name, "arguments": arguments}}
    response = {"choices": [{"message": {"role": "assistant", "tool_calls": [call]}}]}
    one.take(Answer("", "", "tool_calls", 1, 1, 0.1, response=response), counters, 20)
    assert message in one.messages[-1]["content"] and counters.numbers["task 0"] == 0 and one.status is None


def test_a_value_stays_a_literal() -> None:
    assert written("add", {"n": "1) or exit(", "all": [True, None]}) == "add(n='1) or exit(', all=[True, None])"


def test_the_harness_checks_its_own_truth() -> None:
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is in no extra: pip install --no-deps bfcl-eval mpmath")
    harness = Bfcl()
    for category in ("base", "miss_func"):
        task = harness.tasks(category, 1)[0]
        assert harness.problem(task, [[turn] if turn else [] for turn in task.truth]) == ""
        assert harness.problem(replace(task, name="other"), [[] for _ in task.truth]) != ""

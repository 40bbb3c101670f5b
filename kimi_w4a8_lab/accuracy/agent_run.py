"""`eval agent`: conversations with tools that really run, judged by their states and compared task by task.

All conversations go on in steps, so that a run asks many requests at once. A conversation's next request follows from
its answers, and the recorder keeps these, so a resumed run walks through the finished part without asking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from ..base.experiment import write_result
from ..base.request_progress import request_progress
from ..base.server_under_test import Target
from .accuracy import load_outcomes
from .bfcl import AgentTask, written
from .evaluation import RunOptions, evaluated, require_same_plan
from .judge import judge
from .recorder import CHAT, Answer
from .results import AgentResult, ProblemOutcome, Status

SOLVED = "tasks solved"


@dataclass(frozen=True)
class AgentPlan:
    """Settings that decide a run's figures. steps: most answers with calls in one turn. extra: added to each body."""

    category: str = "base"
    limit: int | None = None
    max_tokens: int = 4096
    steps: int = 20
    concurrency: int = 32
    extra: dict[str, Any] = field(default_factory=dict)


class Harness(Protocol):
    """Tasks, tools that run, and a checker; see `bfcl.Bfcl`."""

    def tasks(self, category: str, limit: int | None) -> list[AgentTask]: ...
    def execute(self, task: AgentTask, calls: Sequence[str]) -> list[str]: ...
    def problem(self, task: AgentTask, calls: Sequence[Sequence[Sequence[str]]]) -> str: ...


@dataclass
class Conversation:
    """One task so far. calls: what the model called, by turn and step. status: set when the conversation has ended."""

    task: AgentTask
    messages: list[dict[str, Any]]
    calls: list[list[list[str]]] = field(default_factory=lambda: [[]])
    tokens: int = 0
    seconds: float = 0.0
    status: Status | None = None
    error: str | None = None

    def body(self, model: str, plan: AgentPlan) -> dict[str, Any]:
        tools = list(self.task.tools[len(self.calls) - 1])
        limits = {"max_tokens": plan.max_tokens, "temperature": 0.0}
        return {"model": model, "messages": list(self.messages), "tools": tools, **limits, **plan.extra}

    def take(self, answer: Answer, harness: Harness, steps: int) -> None:
        """Add an answer, run its calls, and begin the next turn when there are none."""
        self.tokens, self.seconds = self.tokens + (answer.completion_tokens or 0), self.seconds + answer.seconds
        if answer.error:
            self.status, self.error = "failed", answer.error
            return
        if answer.finish_reason == "length":
            self.status = "truncated"
            return
        message = answer.response["choices"][0]["message"]
        self.messages.append(message)
        called = message.get("tool_calls") or []
        if called:
            self._run(called, harness)
        if not called or len(self.calls[-1]) >= steps:
            self._next_turn()

    def _run(self, called: Sequence[dict[str, Any]], harness: Harness) -> None:
        """Run the calls of one answer in order. One that cannot be run gets an error, as a tool would answer."""
        done = []
        for call in called:
            try:
                text = self._written(call["function"])
            except ValueError as error:
                result = f"Error: {error}"
            else:
                (result,) = harness.execute(self.task, [text])
                done.append(text)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.calls[-1].append(done)

    def _written(self, function: dict[str, Any]) -> str:
        """Return a call of a declared tool as text, which the harness evaluates. Raises ValueError for any other."""
        known = {tool["function"]["name"] for tool in self.task.tools[len(self.calls) - 1]}
        arguments = json.loads(function["arguments"] or "{}")
        if function["name"] not in known:
            raise ValueError(f"no tool is named {function['name']!r}")
        if not isinstance(arguments, dict) or not all(key.isidentifier() for key in arguments):
            raise ValueError("the arguments are no JSON object with names")
        return written(function["name"], arguments)

    def _next_turn(self) -> None:
        if len(self.calls) == len(self.task.turns):
            self.status = "answered"
            return
        self.messages += self.task.turns[len(self.calls)]
        self.calls.append([])

    def outcome(self, number: int, harness: Harness) -> ProblemOutcome:
        missing: list[list[list[str]]] = [[] for _ in self.task.turns[len(self.calls) :]]
        problem = self.status if self.status != "answered" else harness.problem(self.task, [*self.calls, *missing])
        return ProblemOutcome(
            id=number, question=self.task.name, target="", status=self.status or "failed",
            text=json.dumps(self.calls), extracted={SOLVED: str(problem)}, correct={SOLVED: problem == ""},
            completion_tokens=self.tokens, attempts=1, seconds=round(self.seconds, 3), error=self.error,
        )  # fmt: skip


def run(target: Target, plan: AgentPlan, options: RunOptions, harness: Harness, console: Console) -> Path:
    """Run the conversations and return the run directory, whose result.json holds the verdict.

    Raises KimiError when the run cannot finish. Its answers are kept for `options.resume`.
    """
    if options.baseline:
        require_same_plan(options.baseline, plan, ("category", "max_tokens", "steps", "extra"))
    baseline = load_outcomes(options.baseline) if options.baseline else None
    conversations = [Conversation(task, list(task.turns[0])) for task in harness.tasks(plan.category, plan.limit)]
    with evaluated(target, AgentResult.kind, options, console, plan) as (folder, server, recorder):
        console.print(f"{len(conversations)} conversations with {server.model} at {server.base_url}; {folder}")
        with request_progress("conversations", len(conversations), console) as shown:
            while active := [one for one in conversations if one.status is None]:
                bodies = [one.body(server.model, plan) for one in active]
                for one, answer in zip(active, recorder.ask(CHAT, bodies, plan.concurrency), strict=True):
                    one.take(answer, harness, plan.steps)
                shown(sum(one.status is not None for one in conversations), recorder.note)
    outcomes = [one.outcome(number, harness) for number, one in enumerate(conversations)]
    verdict = judge(outcomes, baseline=baseline, margin=options.margin, max_unusable=options.max_unusable)
    result = AgentResult(
        configuration=server.name, model=server.model, verdict=verdict, baseline=options.baseline,
        requests=recorder.counts, outcomes=outcomes,
    )  # fmt: skip
    write_result(folder, result)
    return folder

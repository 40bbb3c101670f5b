"""`eval tools`: send requests with tools and the vendor's checks to a server, and write the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding, checked
from kimi_w4a8_eagle3.engine.client import EngineClient

from ..base.run_folder import RunFolder
from ..base.server_under_test import Server, Target
from . import tool_requests, tool_scores, vendor_checks
from .evaluation import RunOptions, evaluated
from .recorder import CHAT
from .results import ToolOutcome, ToolsResult


@dataclass(frozen=True)
class ToolPlan:
    """Settings that decide a run's figures. data: None for the built-in problems. limit: number of requests.

    stream: None sends each request as the data says. extra: fields added to each body. max_tokens: limit of a tool call
    that a check forces.
    """

    data: str | None = None
    limit: int | None = None
    stream: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 2048
    concurrency: int = 32


@dataclass(frozen=True, kw_only=True)
class Judging(RunOptions):
    """Settings that decide the verdict on given answers.

    tokenizer: folder or repository; None uses the server's tokenizer if it is on this machine.
    """

    min_similarity: float | None = None
    tokenizer: str | None = None


def run(target: Target, plan: ToolPlan, judging: Judging, console: Console) -> Path:
    """Run one tool-call evaluation and return its run directory, whose result.json holds the verdict.

    Raises KimiError when the run cannot finish. Its answers are kept for `judging.resume`.
    """
    table = tool_scores.published(judging.published, judging.min_similarity)
    judged = table.references[0].configuration if table.references else None  # the vendor's own service comes first
    baseline = load_outcomes(judging.baseline) if judging.baseline else None
    requests = tool_requests.load(plan.data, plan.limit)
    count = vendor_checks.counter(judging.tokenizer) if judging.tokenizer else None
    with evaluated(target, ToolsResult.kind, judging, console, plan) as evaluation:
        server = evaluation.server
        count = count or _own_counter(server)
        probes = vendor_checks.probes(server.model, plan.max_tokens, plan.extra)
        bodies = [_body(request.body, server.model, plan) for request in requests]
        asked = [*bodies, *(probe.body for probe in probes)]
        answers = evaluation.ask("tool calls", CHAT, asked, plan.concurrency, console)
        given, probed = answers[: len(bodies)], list(zip(probes, answers[len(bodies) :], strict=True))
        outcomes = [tool_scores.outcome(request, answer) for request, answer in zip(requests, given, strict=True)]
        # Left out: a request for two answers counts its prompt once, and one with an odd value may count nothing.
        schemas = [(probe.body, answer) for probe, answer in probed if "tools" in probe.body]
        checks = [_marker_check(outcomes), *vendor_checks.check_probes(probed)]
        checks.append(vendor_checks.check_counts([*zip(bodies, given, strict=True), *schemas], count))
        verdict = tool_scores.judge(outcomes, checks, table, judged, baseline, judging.max_unusable)
        facts = {"baseline": judging.baseline, "judged_against": judged, "checks": checks, "outcomes": outcomes}
        return evaluation.finish(ToolsResult, verdict, **facts)


def load_outcomes(folder: Path) -> dict[str, ToolOutcome]:
    """Load a finished run's outcomes by the identity of their requests; raise KimiError for any other folder."""
    found = RunFolder[ToolsResult].open(folder, ToolsResult).result.outcomes
    return {outcome.identity: outcome for outcome in found if outcome.status != "failed"}


def _own_counter(server: Server) -> Callable[[dict[str, Any]], int] | None:
    """Return a counter for the server's tokenizer if it is on this machine."""
    with EngineClient(*server.engine) as client:
        try:
            path = client.tokenizer_path()
        except KimiError:
            return None  # not SGLang, or a router
    return vendor_checks.counter(path) if path and Path(path).is_dir() else None


def _body(body: dict[str, Any], model: str, plan: ToolPlan) -> dict[str, Any]:
    body = {**body, "model": model, **plan.extra}
    streamed = body.pop("stream", False) if plan.stream is None else plan.stream
    body.pop("stream", None)
    body.pop("stream_options", None)
    return vendor_checks.as_stream(body) if streamed else body


def _marker_check(outcomes: Sequence[ToolOutcome]) -> Finding:
    found = [outcome.marker for outcome in outcomes if outcome.marker]
    first = f", the first is {found[0]}" if found else ""
    return checked("markers of calls or thinking in the text", f"{len(found)}{first}", "none", not found)

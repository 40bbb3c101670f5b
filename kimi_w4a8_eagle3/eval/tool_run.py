"""`eval tools`: send requests with tools and the vendor's checks to a server, and write the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from ..base.console import request_progress
from ..base.errors import KimiError
from ..base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, write_json
from ..engine.client import EngineClient
from ..fleet.target import Server, Target, record_of
from . import tool_requests, tool_scores, vendor_checks
from .earlier_run import resumable, write_result
from .outcomes import load_rows, write_rows
from .recorder import ENDPOINTS, REQUESTS, Patience, Recorder, read_answers, request_key
from .smoke import Check
from .tool_scores import Published, ToolOutcome

KIND = "eval-tools"
OUTCOMES = "tool-calls.jsonl"
_CHAT = ENDPOINTS[1]


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


@dataclass(frozen=True)
class Judging:
    """Settings that decide the verdict on given answers, and where it is kept.

    tokenizer: folder or repository; None uses the server's tokenizer if it is on this machine.
    """

    published: str | None = None
    baseline: Path | None = None
    min_similarity: float | None = None
    tokenizer: str | None = None
    max_unusable: float = 0.01
    runs: Path = DEFAULT_ROOT
    patience: Patience = field(default_factory=Patience)


def plan_of(run: dict[str, Any]) -> ToolPlan:
    return ToolPlan(**run["plan"])


def run(target: Target, plan: ToolPlan, judging: Judging, console: Console, resume: Path | None = None) -> Path:
    """Run one tool-call evaluation and return its run directory, whose result.json holds the verdict.

    Raises KimiError when the run cannot finish. Its answers are kept for `resume`.
    """
    table = _table(judging)
    baseline = load_outcomes(judging.baseline) if judging.baseline else None
    requests = tool_requests.load(plan.data, plan.limit)
    count = vendor_checks.counter(judging.tokenizer) if judging.tokenizer else None
    target.check()
    folder = resume or new_run_dir(KIND, judging.runs)
    with target.running(folder / "server.log", console.print) as server:
        if resume is None:
            found = record_of(KIND, {"server": target}, model=server.model, plan=asdict(plan))
            write_json(folder / RECORD, found)
        count = count or _own_counter(server)
        probes = vendor_checks.probes(server.model, plan.max_tokens)
        bodies = [_body(request.body, server.model, plan) for request in requests]
        console.print(
            f"{len(bodies)} requests and {len(probes)} checks on {server.model} at {server.base_url}; {folder}"
        )
        with resumable(folder, console):
            recorder = _ask([*bodies, *(probe.body for probe in probes)], server, plan, judging, folder, console)
    answers = read_answers(folder / REQUESTS)
    given = [answers[request_key(_CHAT, body)] for body in bodies]
    outcomes = [tool_scores.outcome(request, answer) for request, answer in zip(requests, given, strict=True)]
    asked = [(probe, answers[request_key(_CHAT, probe.body)]) for probe in probes]
    checks = [_marker_check(outcomes), *vendor_checks.check_probes(asked)]
    # Left out: a request for two answers counts its prompt once, and one with an odd value may count nothing.
    schemas = [(probe.body, found) for probe, found in asked if "tools" in probe.body]
    counted = [*zip(bodies, given, strict=True), *schemas]
    checks.append(vendor_checks.check_counts(counted, count))
    return _conclude(folder, server, plan, judging, table, baseline, outcomes, checks, recorder)


def load_outcomes(folder: Path) -> dict[str, ToolOutcome]:
    """Load a finished run's outcomes by the identity of their requests; raise KimiError for any other folder."""
    found = load_rows(folder / OUTCOMES, ToolOutcome, "`kimi-w4a8 eval tools`")
    return {outcome.identity: outcome for outcome in found if outcome.status != "failed"}


def _table(judging: Judging) -> Published:
    table = tool_scores.published(judging.published)
    return table if judging.min_similarity is None else replace(table, min_similarity=judging.min_similarity)


def _own_counter(server: Server) -> Callable[[dict[str, Any]], int] | None:
    """Return a counter for the server's tokenizer if it is on this machine."""
    with EngineClient(server.base_url, server.api_key) as client:
        try:
            path = client.tokenizer_path()
        except KimiError:
            return None  # not SGLang, or a router
    return vendor_checks.counter(path) if path and Path(path).is_dir() else None


def _body(body: dict[str, Any], model: str, plan: ToolPlan) -> dict[str, Any]:
    """Return a request body as it is sent."""
    body = {**body, "model": model, **plan.extra}
    streamed = body.pop("stream", False) if plan.stream is None else plan.stream
    body.pop("stream", None)
    body.pop("stream_options", None)
    return vendor_checks.as_stream(body) if streamed else body


def _ask(
    bodies: Sequence[dict[str, Any]], server: Server, plan: ToolPlan, judging: Judging, folder: Path, console: Console
) -> Recorder:
    """Send every request through the recorder, which keeps the answers."""
    with (
        Recorder(server.base_url, folder / REQUESTS, judging.patience, server.api_key) as recorder,
        httpx.Client(base_url=recorder.base_url, timeout=None, limits=httpx.Limits(max_connections=None)) as http,  # noqa: S113 the recorder sets the time limits
        request_progress("tool calls", len(bodies), console) as shown,
        ThreadPoolExecutor(plan.concurrency) as pool,
    ):
        for done in as_completed([pool.submit(http.post, _CHAT, json=body) for body in bodies]):
            shown(recorder.finished, recorder.note)
            if recorder.fatal is not None:
                pool.shutdown(cancel_futures=True)
                raise KimiError(recorder.fatal, where=server.base_url)
            done.result()
    return recorder


def _marker_check(outcomes: Sequence[ToolOutcome]) -> Check:
    found = [outcome.marker for outcome in outcomes if outcome.marker]
    first = f", the first is {found[0]}" if found else ""
    return Check("markers of calls or thinking in the text", f"{len(found)}{first}", "none", not found)


def _conclude(
    folder: Path, server: Server, plan: ToolPlan, judging: Judging, table: Published,
    baseline: dict[str, ToolOutcome] | None, outcomes: list[ToolOutcome], checks: list[Check], recorder: Recorder,
) -> Path:  # fmt: skip
    judged = table.references[0].configuration if table.references else None  # the vendor's own service comes first
    verdict = tool_scores.judge(outcomes, checks, table, judged, baseline, judging.max_unusable)
    write_rows(folder / OUTCOMES, outcomes)
    facts = {
        "plan": asdict(plan),
        "baseline": judging.baseline,
        "judged_against": judged,
        "finish_reasons": dict(Counter(str(outcome.finish_reason) for outcome in outcomes)),
        "checks": [asdict(check) for check in checks],
        "invalid": [asdict(outcome) for outcome in outcomes if outcome.problem],
    }
    return write_result(folder, KIND, "tool calls", server, recorder, verdict, **facts)

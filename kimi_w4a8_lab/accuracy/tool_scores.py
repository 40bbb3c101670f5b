"""Scores of answers with tool calls: finish reasons, valid arguments, and the comparison with a reference.

The measures are those of the K2 Vendor Verifier (MoonshotAI/K2-Vendor-Verifier). An answer *calls* when its
finish_reason is `tool_calls`. Trigger similarity is the F1 of calling against a reference's answers to the same
requests. Schema accuracy is the share of calling answers whose calls all fit the schemas declared in their request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from kimi_w4a8_eagle3.base.errors import UsageError
from kimi_w4a8_eagle3.base.finding import Finding
from kimi_w4a8_eagle3.base.installed import operator_dir

from ..base.verdict import Verdict
from .judge import judge_references, judge_validity
from .recorder import Answer
from .results import CALLS, Accuracy, Judgement, Reference, ToolOutcome
from .significance import ShareInterval, wilson
from .tool_requests import ToolRequest

SCHEMA_ACCURACY = "schema accuracy"
SIMILARITY = "trigger similarity (F1)"
_BASELINE = "the baseline"
MARKERS = ("<|tool_call", "<think>", "</think>")


@dataclass(frozen=True)
class Published:
    """A vendor's published results for one model: the accepted similarity and schema accuracies."""

    min_similarity: float
    references: list[Reference]


def published(name: str | None, min_similarity: float | None = None) -> Published:
    """Load a table of `eval/tool_calls.json`; without a name only the first one's threshold.

    min_similarity: another threshold instead of the table's.
    """
    found = json.loads((operator_dir("eval") / "tool_calls.json").read_text())
    tables = found["tables"]
    if name and name not in tables:
        raise UsageError(f"no published table {name!r}", "--published", ", ".join(tables))
    table = tables[name or next(iter(tables))]
    rows = table["valid_of_called"] if name else {}
    references = [
        Reference(provider, SCHEMA_ACCURACY, valid / called, called, found["source"])
        for provider, (valid, called) in rows.items()
    ]
    return Published(table["min_similarity"] if min_similarity is None else min_similarity, references)


def message_of(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = answer.response["choices"][0]["message"]
    return message


def outcome(request: ToolRequest, answer: Answer) -> ToolOutcome:
    if answer.error is not None:
        return ToolOutcome(request.identity, "failed", request.expected, None, [], error=answer.error)
    message = message_of(answer)
    calls = message.get(CALLS) or []
    problem = ""
    if answer.finish_reason == CALLS:
        problem = next(filter(None, (wrong(call, request.tools) for call in calls)), "") if calls else "no call in it"
    said = f"{message.get('content') or ''}\n{message.get('reasoning_content') or ''}"
    marker = next((marker for marker in MARKERS if marker in said), "")
    status = "truncated" if answer.finish_reason == "length" else "answered"
    return ToolOutcome(request.identity, status, request.expected, answer.finish_reason, calls, problem, marker)


def wrong(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the error of a call under its request's schema; empty for a valid call."""
    function = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments")
    declared = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    if declared is None:
        return f"no tool is named {name!r}"
    schema = declared.get("parameters") or {}
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return f"arguments are not JSON: {error}"
    try:
        kind = validators.validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        kind(schema, registry=Registry()).validate(given)  # an empty registry fetches no remote schema
    except ValidationError as error:
        return f"{error.json_path}: {error.message}"
    except (SchemaError, Unresolvable) as error:
        return f"the declared schema is unusable: {str(error).splitlines()[0]}"
    return ""


def schema_accuracy(outcomes: Iterable[ToolOutcome]) -> Accuracy:
    """Return the share of answers with calls whose calls are all valid."""
    calling = [outcome for outcome in outcomes if outcome.called]
    valid = sum(not outcome.problem for outcome in calling)
    return Accuracy(SCHEMA_ACCURACY, valid, len(calling), wilson(valid, len(calling)) if calling else None)


def similarity(called: Sequence[tuple[bool, bool]]) -> Accuracy:
    """Return the F1 of (ours, reference's) calling with its 95 % interval.

    F1 = 2J / (1 + J), where J is the share of requests that both sides answer with calls among those where either does.
    J is a share of independent requests, so Wilson's limits of J give those of F1.
    """
    both = sum(ours and theirs for ours, theirs in called)
    either = sum(ours or theirs for ours, theirs in called)
    if not either:
        return Accuracy(SIMILARITY, 0, 0, None)
    share = wilson(both, either)
    return Accuracy(
        SIMILARITY, both, either, ShareInterval(*(2 * j / (1 + j) for j in (share.value, share.low, share.high)))
    )


def judge(
    outcomes: Sequence[ToolOutcome],
    checks: Sequence[Finding],
    table: Published,
    judged: str | None = None,
    baseline: Mapping[str, ToolOutcome] | None = None,
    max_unusable: float = 0.01,
) -> Judgement:
    """Return the conclusion from one run.

    judged: configuration of the table whose schema accuracy decides. baseline: outcomes of an earlier run by identity.
    With a baseline its calls replace the data's own as reference, and its schema accuracy also decides.
    """
    concluded = Judgement(
        problems=len(outcomes),
        failed=sum(outcome.status == "failed" for outcome in outcomes),
        truncated=sum(outcome.status == "truncated" for outcome in outcomes),
    )
    judge_validity(concluded, max_unusable)
    answered = [outcome for outcome in outcomes if outcome.status != "failed"]
    found = schema_accuracy(answered)
    concluded.accuracies.append(found)
    earlier = schema_accuracy(baseline.values()) if baseline else None
    if found.interval and earlier and earlier.interval:
        known = Reference(_BASELINE, SCHEMA_ACCURACY, earlier.interval.value, earlier.answered, "an earlier run")
        judge_references(concluded, [known], _BASELINE)
    if found.interval:
        judge_references(concluded, table.references, judged)
    if not (judged or earlier):
        concluded.reasons.append("schema accuracy is not judged: add --published TABLE or --baseline RUN")
    _judge_similarity(concluded, answered, baseline, table.min_similarity)
    concluded.judge(checks)
    return concluded


def _judge_similarity(
    concluded: Judgement, answered: Sequence[ToolOutcome], baseline: Mapping[str, ToolOutcome] | None, least: float
) -> None:
    reference = {outcome.identity: outcome.expected for outcome in answered}
    if baseline is not None:
        reference = {name: outcome.finish_reason for name, outcome in baseline.items()}
    known = [outcome for outcome in answered if reference.get(outcome.identity)]
    pairs = [(outcome.called, reference[outcome.identity] == CALLS) for outcome in known]
    if not pairs:
        concluded.reasons.append("the data has no finish reasons of a reference: add --baseline RUN")
        return
    found = similarity(pairs)
    concluded.accuracies.append(found)
    if found.interval is None:
        concluded.conclude(
            Verdict.INCONCLUSIVE, f"no tool was called in {len(pairs)} requests: give others with --data"
        )
        return
    state, words = Verdict.INCONCLUSIVE, "too few requests to tell: raise --limit, or give more with --data"
    if found.interval.low >= least:
        state, words = Verdict.PASS, "like the reference"
    elif found.interval.high < least:
        state, words = Verdict.FAIL, "unlike the reference"
    concluded.conclude(state, f"{SIMILARITY} {found.interval} of {len(pairs)}, wanted {least:.0%}: {words}")

"""The rows of the dashboard: what each panel asks and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_rows import gpus, routing, watchdog
from panels import OF_OBJECTIVE, bars, lines, number, states
from queries import (
    ACCEPT_LENGTH,
    E2E,
    ERROR_RATIO,
    ITL,
    PHASES,
    REPLICA,
    TPOT,
    TTFT,
    added,
    by_replica,
    cache_hits,
    objective,
    of,
    percentiles,
    phase,
    quantile,
    rate,
    share_of_objective,
)

PUBLISHED = Path(__file__).parents[2] / "bench/published"

TOKENS = "sglang:realtime_tokens_total"
DECODE, PREFILL = 'mode="decode"', 'mode="prefill_compute"'
UNPLANNED, ROLLING = 'reason!~"rolling.*"', 'reason=~"rolling.*"'


def glance() -> list[Any]:
    """Health of the service."""
    firing = 'sum(ALERTS{alertname=~"Kimi.*", alertstate="firing"}) or vector(0)'
    return [
        number(
            "Replicas",
            "Replicas that take requests, of all.",
            "none",
            [(f"sum({of('kimi_replica_ready')})", "ready"), (f"count({of('kimi_replica_ready')})", "of")],
            steps=((None, "red"), (1, "green")),
            overrides={"of": {"color": {"mode": "fixed", "fixedColor": "text"}}},
        ),
        number(
            "Alerts firing",
            "Firing alerts of launch/prometheus/rules; docs/runbook.md says what to do.",
            "none",
            [(firing, "")],
            steps=((None, "green"), (1, "red")),
        ),
        number(
            "Errors",
            "Share of 5xx in the last 5 minutes: of the router's answers, without a router of the engines'.",
            "percentunit",
            [(ERROR_RATIO, "")],
            steps=((None, "green"), (0.001, "orange"), (0.02, "red")),
            decimals=1,
        ),
        number(
            "TTFT, median",
            "Time to the first token over 5 minutes, and as a share of the recipe's objective (needs the rules).",
            "s",
            [(quantile(0.5, TTFT, "5m"), "now"), (share_of_objective(TTFT, "ttft_p50_seconds"), "of objective")],
            overrides=OF_OBJECTIVE,
        ),
        number(
            "TPOT, median",
            "Time per output token over 5 minutes, and as a share of the recipe's objective (needs the rules).",
            "s",
            [(quantile(0.5, TPOT, "5m"), "now"), (share_of_objective(TPOT, "tpot_p50_seconds"), "of objective")],
            overrides=OF_OBJECTIVE,
        ),
        number(
            "Accept length, now",
            "Tokens committed per verify step in the last 5 minutes; 1.0 means that no draft is accepted.",
            "none",
            [(ACCEPT_LENGTH, "")],
            steps=((None, "red"), (1.5, "orange"), (2.3, "green")),
            decimals=2,
        ),
        number(
            "Output",
            "Tokens generated per second, all chosen replicas.",
            "suffix: tok/s",
            [(f"sum({rate(of(TOKENS, DECODE))})", "")],
            decimals=0,
        ),
        number("Running", "Requests in the engines now.", "none", [(f"sum({of('sglang:num_running_reqs')})", "")]),
        number(
            "Queued",
            "Requests that wait in the engines.",
            "none",
            [(f"sum({of('sglang:num_queue_reqs')})", "")],
            steps=((None, "green"), (1, "orange"), (20, "red")),
        ),
        number(
            "KV cache, fullest",
            "Share of KV slots in use on the fullest replica.",
            "percentunit",
            [(f"max({of('sglang:token_usage')})", "")],
            steps=((None, "green"), (0.8, "orange"), (0.95, "red")),
            decimals=0,
        ),
        number(
            "Page-guard head-room",
            "Tokens from the KV pool to what 32-bit page offsets reach, of the worst replica. Below 0: wrong answers.",
            "short",
            [(f"min({of('kimi_page_guard_cap_tokens')} - {of('kimi_page_guard_pool_tokens')})", "")],
            steps=((None, "red"), (0, "green")),
        ),
        number(
            "Restarts, last hour",
            "Restarts of engines that ended or stalled; rolling restarts are not counted.",
            "none",
            [(f"sum({added(of('kimi_replica_restarts_total', UNPLANNED), '1h')}) or vector(0)", "")],
            steps=((None, "green"), (1, "orange"), (3, "red")),
            decimals=0,
        ),
        states("Phases", "Only `ready` takes new requests.", [(phase(), REPLICA)], PHASES),
    ]


def latency() -> list[Any]:
    """Return the row of waiting times."""
    return [
        lines("TTFT", "From arrival at the engine to its first token.", "s", percentiles(TTFT, "ttft_p50_seconds")),
        lines(
            "TPOT",
            "Per request: its decode time over its tokens. The objective is the published median at concurrency 40, "
            "plus a margin.",
            "s",
            percentiles(TPOT, "tpot_p50_seconds"),
        ),
        lines("ITL", "Between streamed tokens; with speculation several come at once.", "s", percentiles(ITL)),
        lines("E2E", "The whole request. Clients with a shorter timeout leave.", "s", percentiles(E2E)),
        lines(
            "Time in the queue",
            "Before the first prefill; a rise here and not in TPOT asks for replicas.",
            "s",
            percentiles("sglang:queue_time_seconds"),
        ),
        lines(
            "TTFT by replica",
            "Median. One replica apart from the others is a fault of that machine.",
            "s",
            [(f"histogram_quantile(0.5, sum by (instance, replica, le) ({rate(of(TTFT + '_bucket'))}))", REPLICA)],
        ),
    ]


def throughput() -> list[Any]:
    """Return the row of throughput."""
    return [
        lines(
            "Output tokens per second",
            "As they are made.",
            "none",
            [(by_replica(rate(of(TOKENS, DECODE))), REPLICA)],
            stacked=True,
        ),
        lines(
            "Input tokens per second",
            "Prefilled; hits in the prefix cache are not computed and not counted.",
            "none",
            [(by_replica(rate(of(TOKENS, PREFILL))), REPLICA)],
            stacked=True,
        ),
        lines(
            "Requests finished per second",
            "By replica.",
            "none",
            [(by_replica(rate(of("sglang:num_requests_total"))), REPLICA)],
            stacked=True,
        ),
    ]


def speculation() -> list[Any]:
    """Acceptance of the draft."""
    real = json.loads((PUBLISHED / "acceptance.json").read_text())["real"]
    texts = {row["text"]: row["accept_length"] for row in real}
    published = {name: texts[name] for name in ("MTBench", "GSM8K", "HumanEval")}
    repeated = json.loads((PUBLISHED / "mi325x-eagle3.json").read_text())["points"]["con40"]["eagle3"]
    published["repeated text"] = repeated["accept_length"]
    return [
        lines(
            "Accept length",
            "Tokens committed per verify step over the last minute, and on the canary prompts, whose text never "
            "changes: both low is a fault, only the traffic low is its text. And the draft steps in use.",
            "none",
            [
                (of("kimi_accept_length"), REPLICA),
                (of("kimi_canary_accept_length"), "canary " + REPLICA),
                (objective("accept_length_min"), "objective, at least"),
                (of("sglang:spec_num_steps"), "draft steps " + REPLICA),
            ],
            top=4,
            decimals=2,
        ),
        lines(
            "Accepted by position",
            "Share of the verify steps in which the first, second, third draft token was accepted.",
            "percentunit",
            [(f"avg by (position) ({of('kimi_accept_rate')})", "position {{position}}")],
            top=1,
        ),
        bars(
            "Accept length of this text and of others",
            "Acceptance belongs to the text. Published values are of the Kimi-K2.5 draft.",
            "none",
            [
                (ACCEPT_LENGTH, "this traffic, 5 minutes"),
                (f"avg({of('kimi_canary_accept_length')})", "canary"),
                *((f"vector({value})", name) for name, value in published.items()),
            ],
            top=4,
        ),
    ]


def memory() -> list[Any]:
    """Free memory and slots."""
    return [
        lines(
            "KV cache in use",
            "Near 100 % requests wait or are retracted and computed again.",
            "percentunit",
            [(by_replica(of("sglang:token_usage"), "max"), REPLICA)],
            top=1,
        ),
        lines(
            "Prompts found in the prefix cache",
            "Share of the prompt tokens that were not computed again; none without a prefix cache.",
            "percentunit",
            [(cache_hits(), REPLICA)],
            top=1,
        ),
        lines(
            "Page-offset guard",
            "The pool must stay below the cap: beyond it page offsets overflow int32 and answers are silently wrong.",
            "short",
            [
                (by_replica(of("kimi_page_guard_pool_tokens"), "max"), "pool " + REPLICA),
                (f"min({of('kimi_page_guard_cap_tokens')})", "objective: cap"),
            ],
        ),
    ]


def concurrency() -> list[Any]:
    """Load."""
    return [
        lines(
            "Running requests",
            "In the batch.",
            "none",
            [(by_replica(of("sglang:num_running_reqs")), REPLICA)],
            stacked=True,
        ),
        lines(
            "Queued requests",
            "Waiting for a place in the batch.",
            "none",
            [(by_replica(of("sglang:num_queue_reqs")), REPLICA)],
            stacked=True,
        ),
        lines(
            "Retracted and aborted",
            "Retracted: the KV cache was full, work is done twice. Aborted: the client left.",
            "none",
            [
                (by_replica(of("sglang:num_retracted_reqs")), "retracted now " + REPLICA),
                (by_replica(added(of("sglang:num_aborted_requests_total"), "1m")), "aborted per minute " + REPLICA),
            ],
        ),
    ]


ROWS: dict[str, Callable[[], list[Any]]] = {
    "Service at a glance": glance,
    "Latency": latency,
    "Throughput": throughput,
    "Speculation": speculation,
    "KV cache and page-offset guard": memory,
    "Queue and concurrency": concurrency,
    "Router": routing,
    "Watchdog and restarts": watchdog,
    "GPUs": gpus,
}

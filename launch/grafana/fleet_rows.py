"""The rows of the dashboard about what stands around the engines: the router, restarts and the GPUs."""

from __future__ import annotations

from typing import Any

from panels import facts, lines, states
from queries import REPLICA, added, exported, of, rate, router

BREAKER = {0: ("closed", "green"), 1: ("open", "red"), 2: ("half open", "orange")}


def routing() -> list[Any]:
    """Return the row of requests by worker, and of failures."""
    return [
        lines(
            "Requests per second by worker",
            "Attempts that ended, by outcome.",
            "none",
            [(f"sum by (worker, outcome) ({rate(router('smg_worker_cb_outcomes_total'))})", "{{worker}} {{outcome}}")],
            stacked=True,
            span=6,
        ),
        lines(
            "Answers per second by status",
            "What clients got; /readiness and the registrar's calls are among the 200 and 503 without an error code.",
            "none",
            [
                (
                    f"sum by (status_code, error_code) ({rate(router('smg_http_responses_total'))})",
                    "{{status_code}} {{error_code}}",
                )
            ],
            span=6,
        ),
        lines(
            "Retries and errors",
            "A retry that worked is invisible to the client; an exhausted one is a 5xx.",
            "none",
            [
                (f"sum({added(router('smg_worker_retries_total'), '1m')})", "retries per minute"),
                (f"sum({added(router('smg_worker_retries_exhausted_total'), '1m')})", "retries exhausted per minute"),
                (
                    f"sum by (error_type) ({added(router('smg_worker_errors_total'), '1m')})",
                    "{{error_type}} per minute",
                ),
            ],
            span=6,
        ),
        lines(
            "Requests in flight by worker",
            "The cache-aware policy keeps conversations on their worker until the load differs too much.",
            "none",
            [(f"sum by (worker) ({router('smg_worker_requests_active')} >= 0)", "{{worker}}")],
            stacked=True,
            span=6,
        ),
        states(
            "Circuit breakers",
            "Open: the worker failed too often and gets nothing until it answers again.",
            [(f"max by (worker) ({router('smg_worker_cb_state')} >= 0)", "{{worker}}")],
            BREAKER,
        ),
    ]


def watchdog() -> list[Any]:
    """Return the row of the replicas' states."""
    return [
        lines(
            "Seconds since progress",
            "Since a token advanced, or a health check generated one. At the timeout the watchdog restarts the engine.",
            "s",
            [
                (of("kimi_seconds_since_progress"), REPLICA),
                (f"min({of('kimi_progress_timeout_seconds')})", "objective: watchdog's timeout"),
            ],
        ),
        lines(
            "Restarts and stalls",
            "Totals since the supervisor started.",
            "none",
            [
                (of("kimi_replica_restarts_total"), "restarts, {{reason}} " + REPLICA),
                (of("kimi_watchdog_stalls_total"), "stalls " + REPLICA),
            ],
            decimals=0,
        ),
        facts(
            "Package",
            "Versions and recipe, and how many endpoints run them; more than one line during an update.",
            [
                (
                    f"count by (version, sglang, recipe) ({router('kimi_build_info')})",
                    "{{recipe}}, kimi {{version}}, SGLang {{sglang}}",
                )
            ],
        ),
        facts(
            "MoE backend",
            "Kernels that compute the experts, and in how many replicas; `reference` on a GPU is slow.",
            [
                (
                    f"count by (backend) (group by (instance, replica, backend) ({of('kimi_moe_backend_info')}))",
                    "{{backend}}",
                )
            ],
        ),
    ]


def gpus() -> list[Any]:
    """Return the row of the GPUs' load. AMD's Device Metrics Exporter is a scrape job of its own without replicas."""
    gpu = "{{hostname}} {{gpu_id}}"
    return [
        lines(
            "GPU memory used",
            "Share of each GPU's memory. Weights and KV cache are allocated at the start, so it should stay level.",
            "percentunit",
            [(f"{exported('gpu_used_vram')} / {exported('gpu_total_vram')}", gpu)],
            top=1,
            span=6,
        ),
        lines("GPU power", "Socket power.", "watt", [(exported("gpu_package_power"), gpu)], span=6),
        lines(
            "GPU temperature",
            "At the junction, the hottest point. One GPU far above the others is throttled before them.",
            "celsius",
            [(exported("gpu_junction_temperature"), gpu)],
            span=6,
        ),
        lines(
            "GPU activity",
            "Share of the time in which a kernel runs; low under load points at the host or at communication.",
            "percent",
            [(exported("gpu_gfx_activity"), gpu)],
            top=100,
            span=6,
        ),
    ]

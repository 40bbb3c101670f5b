"""PromQL of the dashboard's panels. `$instance` and `$replica` are its variables."""

from __future__ import annotations

REPLICA = "{{instance}} {{replica}}"
TTFT, TPOT = "sglang:time_to_first_token_seconds", "sglang:request_time_per_output_token_seconds"
ITL, E2E = "sglang:inter_token_latency_seconds", "sglang:e2e_request_latency_seconds"
PHASES = {
    1: ("starting", "blue"),
    2: ("checking", "light-blue"),
    3: ("ready", "green"),
    4: ("draining", "yellow"),
    5: ("stalled", "orange"),
    6: ("down", "red"),
}
_INSTANCE, _REPLICA = 'instance=~"$instance"', 'replica=~"$replica"'


def of(metric: str, *labels: str) -> str:
    """A metric of the chosen replicas."""
    return metric + "{" + ", ".join((_INSTANCE, _REPLICA, *labels)) + "}"


def router(metric: str, *labels: str) -> str:
    """A metric of the chosen instances' routers; they know workers, not replicas."""
    return metric + "{" + ", ".join((_INSTANCE, *labels)) + "}"


def exported(metric: str) -> str:
    """One value a GPU, by either name that AMD's Device Metrics Exporter may give: its prefix is a setting."""
    either = " or ".join(f"max by (hostname, gpu_id) ({prefix}{metric})" for prefix in ("", "amd_"))
    return f"({either})"


def rate(series: str) -> str:
    """Per second, over an interval that fits zoom and scrapes."""
    return f"rate({series}[$__rate_interval])"


def by_replica(expr: str, operator: str = "sum") -> str:
    """One value a replica: ranks and label values of one engine belong together."""
    return f"{operator} by (instance, replica) ({expr})"


def quantile(q: float, histogram: str, window: str = "$__rate_interval") -> str:
    """Over all chosen replicas together."""
    return f"histogram_quantile({q}, sum by (le) (rate({of(histogram + '_bucket')}[{window}])))"


def objective(name: str) -> str:
    """The strictest objective of the chosen instances; no data where the rules are not loaded."""
    return f"min({router('kimi:instance_objective_' + name)})"


def percentiles(histogram: str, objective_name: str | None = None) -> list[tuple[str, str]]:
    """P50, P90, P99, and the objective for the median."""
    found = [(quantile(q, histogram), f"P{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]
    return [*found, (objective(objective_name), "objective for P50")] if objective_name else found


def share_of_objective(histogram: str, objective_name: str) -> str:
    """The median of five minutes over its objective."""
    return f"{quantile(0.5, histogram, '5m')} / {objective(objective_name)}"


def added(series: str, window: str) -> str:
    """By how much a counter grew; its first value counts too, which increase() leaves out."""
    return f"clamp_min({series} - ({series} offset {window} or 0 * {series}), 0)"


def phase() -> str:
    """The phase of each replica as its number in PHASES."""
    named = (of("kimi_replica_phase", f'phase="{name}"') + f" * {number}" for number, (name, _) in PHASES.items())
    return by_replica(" or ".join(named))


def _accepted_at(position: int) -> str:
    """Verify steps per second that accepted the draft token at this position."""
    series = of("kimi_spec_steps_total", f'accepted=~"[{position}-9]"')
    return f"sum(rate({series}[5m]))"


ACCEPT_LENGTH = f"1 + ({' + '.join(map(_accepted_at, (1, 2, 3)))}) / (sum(rate({of('kimi_spec_steps_total')}[5m])) > 0)"


def cache_hits() -> str:
    """Share of the prompt tokens that each replica found in its prefix cache."""
    prompted, found = (of("sglang:realtime_tokens_total", f'mode=~"prefill_{mode}"') for mode in (".*", "cache"))
    return f"{by_replica(rate(found))} / ({by_replica(rate(prompted))} > 0)"


def _error_ratio(failed: str, asked: str) -> str:
    """Without errors their series does not exist yet; without requests there is no ratio."""
    return f"(sum(rate({failed}[5m])) or vector(0)) / (sum(rate({asked}[5m])) > 0)"


_ANSWERED = ('endpoint=~"/v1/.*|/generate"', 'method="POST"')
# Only answers to requests have an error code, readiness probes have none.
ERROR_RATIO = " or ".join(
    (
        _error_ratio(
            router("smg_http_responses_total", 'status_code=~"5.."', 'error_code!=""'),
            router("smg_router_requests_total"),
        ),
        _error_ratio(
            of("sglang:http_responses_total", *_ANSWERED, 'status_code=~"5.."'),
            of("sglang:http_responses_total", *_ANSWERED),
        ),
    )
)

"""Our own metric families: facts that the supervisor knows and no engine can report about itself."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .. import __version__
from ..base.installed import version_of
from ..engine.metrics import Acceptance
from .replica_state import Phase, ReplicaState

Series = Iterable[tuple[Sequence[str], float]]
Family = GaugeMetricFamily | CounterMetricFamily


def fleet_families(
    recipe: str, replicas: Sequence[ReplicaState], recent: Mapping[str, Acceptance | None], answering: Collection[str]
) -> list[Metric]:
    """Return the families of all replicas.

    recent: acceptance of the last minute by replica. answering: replicas whose own metrics were just read.
    """
    running = (__version__, version_of("sglang") or "", recipe)  # `kimi-w4a8 route` runs without an engine
    labels = ("version", "sglang", "recipe")
    build = _family("kimi_build_info", "Always 1; what is running.", labels, [(running, 1.0)])
    return [build, *_states(replicas, answering), *_acceptance(replicas, recent)]


def seconds_since_progress(replica: ReplicaState) -> float | None:
    """Return the age of the last progress; None before the watchdog started."""
    return None if replica.last_progress is None else max(time.monotonic() - replica.last_progress, 0.0)


def _states(replicas: Sequence[ReplicaState], answering: Collection[str]) -> list[Metric]:
    one = ("replica",)
    waited = [((r.name,), age) for r in replicas if (age := seconds_since_progress(r)) is not None]
    return [
        _family(
            "kimi_replica_phase",
            "1 for the phase that the replica is in, 0 for all others.",
            ("replica", "phase"),
            [((r.name, phase.value), float(r.phase is phase)) for r in replicas for phase in Phase],
        ),
        _family(
            "kimi_replica_ready", "1 while the replica takes requests.", one, [((r.name,), r.ready) for r in replicas]
        ),
        _family(
            "kimi_replica_up",
            "1 when the engine's own metrics were read for this exposition.",
            one,
            [((r.name,), r.name in answering) for r in replicas],
        ),
        _family(
            "kimi_seconds_since_progress",
            "Seconds since a token counter moved or a health check generated a token.",
            one,
            waited,
        ),
        _family(
            "kimi_progress_timeout_seconds",
            "Seconds without progress after which the watchdog calls the replica stalled.",
            one,
            [((r.name,), r.progress_timeout_s) for r in replicas if r.progress_timeout_s > 0],
        ),
        _family(
            "kimi_watchdog_stalls",
            "Stalls that the progress watchdog found.",
            one,
            [((r.name,), r.stalls) for r in replicas],
            CounterMetricFamily,
        ),
        _family(
            "kimi_replica_restarts",
            "Restarts of the replica by reason.",
            ("replica", "reason"),
            [((r.name, reason), count) for r in replicas for reason, count in sorted(r.restarts.items())],
            CounterMetricFamily,
        ),
    ]


def _acceptance(replicas: Sequence[ReplicaState], recent: Mapping[str, Acceptance | None]) -> list[Metric]:
    known = {name: found for name, found in recent.items() if found is not None}
    canaries = [(r.name, r.canary, r.canary_at) for r in replicas if r.canary is not None and r.canary_at is not None]
    return [
        _family(
            "kimi_accept_length",
            "Tokens committed per verify step over the last minute, the bonus token included.",
            ("replica",),
            [((name,), found.length) for name, found in known.items()],
        ),
        _family(
            "kimi_accept_rate",
            "Share of the last minute's verify steps that accepted the draft token at this position.",
            ("replica", "position"),
            [
                ((name, str(position)), share)
                for name, found in known.items()
                for position, share in enumerate(found.per_position, start=1)
            ],
        ),
        _family(
            "kimi_canary_accept_length",
            "Accept length of the last canary prompts.",
            ("replica",),
            [((name,), canary.length) for name, canary, _ in canaries],
        ),
        _family(
            "kimi_canary_timestamp_seconds",
            "When the canary prompts last ran, in Unix time.",
            ("replica",),
            [((name,), at) for name, _, at in canaries],
        ),
    ]


def _family(
    name: str, help_text: str, labels: Sequence[str], series: Series, kind: type[Family] = GaugeMetricFamily
) -> Metric:
    family = kind(name, help_text, labels=labels)
    for values, value in series:
        family.add_metric(values, float(value))
    return family

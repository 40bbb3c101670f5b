"""Our own metric families: facts that the supervisor knows and no engine can report about itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .. import __version__
from ..base.installed import version_of
from ..engine.metrics import Acceptance
from .state import EngineState, Phase

Series = Iterable[tuple[Sequence[str], float]]
Family = GaugeMetricFamily | CounterMetricFamily


def supervisor_families(state: EngineState, recent: Acceptance | None, answered: bool) -> list[Metric]:
    """Return our families. recent: acceptance of the last minute. answered: the engine's metrics were just read."""
    running = (__version__, version_of("sglang") or "", state.recipe)
    labels = ("version", "sglang", "recipe")
    build = _family("kimi_build_info", "1; labels name what runs.", labels, [(running, 1.0)])
    return [build, *_state(state, answered), *_acceptance(state, recent)]


def seconds_since_progress(state: EngineState) -> float | None:
    """Return the age of the last progress; None before the watchdog started."""
    return None if state.last_progress is None else max(time.monotonic() - state.last_progress, 0.0)


def _state(state: EngineState, answered: bool) -> list[Metric]:
    phases: Series = [((phase.value,), state.phase is phase) for phase in Phase]
    restarts: Series = [((reason,), count) for reason, count in sorted(state.restarts.items())]
    timeout_s = state.progress_timeout_s or None
    return [
        _family("kimi_engine_phase", "1 for the phase that the engine is in, 0 for all others.", ("phase",), phases),
        _one("kimi_engine_ready", "1 while the engine takes requests.", state.ready),
        _one("kimi_engine_start_time_seconds", "When the engine last began to start, in Unix time.", state.started),
        _one("kimi_engine_up", "1 when the engine's own metrics were read for this exposition.", answered),
        _one(
            "kimi_seconds_since_progress",
            "Seconds since a token counter moved or a health check generated a token.",
            seconds_since_progress(state),
        ),
        _one(
            "kimi_progress_timeout_seconds",
            "Seconds without progress after which the watchdog calls the engine stalled.",
            timeout_s,
        ),
        _family(
            "kimi_watchdog_stalls",
            "Stalls that the progress watchdog found.",
            (),
            [((), state.stalls)],
            CounterMetricFamily,
        ),
        _family("kimi_engine_restarts", "Restarts by reason.", ("reason",), restarts, CounterMetricFamily),
    ]


def _acceptance(state: EngineState, recent: Acceptance | None) -> list[Metric]:
    positions = () if recent is None else recent.per_position
    return [
        _one(
            "kimi_accept_length",
            "Tokens committed per verify step over the last minute, the bonus token included.",
            None if recent is None else recent.length,
        ),
        _family(
            "kimi_accept_rate",
            "Share of the last minute's verify steps that accepted the draft token at this position.",
            ("position",),
            [((str(position),), share) for position, share in enumerate(positions, start=1)],
        ),
        _one(
            "kimi_canary_accept_length",
            "Accept length of the last canary prompts.",
            None if state.canary is None else state.canary.length,
        ),
        _one("kimi_canary_timestamp_seconds", "When the canary prompts last ran, in Unix time.", state.canary_at),
    ]


def _one(name: str, help_text: str, value: float | None) -> Metric:
    """Return a gauge without labels, and without a sample if there is no value."""
    return _family(name, help_text, (), [] if value is None else [((), value)])


def _family(
    name: str, help_text: str, labels: Sequence[str], series: Series, kind: type[Family] = GaugeMetricFamily
) -> Metric:
    family = kind(name, help_text, labels=labels)
    for values, value in series:
        family.add_metric(values, float(value))
    return family

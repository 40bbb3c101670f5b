"""Add metrics that SGLang's /metrics lacks: verify steps by accepted drafts, the page guard, the MoE backend.

SGLang 0.5.20 also lacks the time per output token of a request. It is added under the name that 0.5.23 uses.

Where there are metrics, the access log leaves out the requests that read them.

SGLang builds its collectors only with --enable-metrics; without it these hooks do nothing. The hooks import
prometheus_client themselves. At its import it reads from the environment whether several processes share their
metrics, and the engine sets that variable after it loads the plugins.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from ...engine.given_folder import UNCOUNTED
from ...moe.dispatch import selected_backends
from ..hooks import Feature, missing_features

if TYPE_CHECKING:
    from prometheus_client import Gauge
    from sglang.srt.managers.io_struct import BatchStrOutput
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, TokenizerMetricsCollector
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_COLLECTORS = "sglang.srt.observability.metrics_collector"
_TOKENIZER_COLLECTOR = f"{_COLLECTORS}.TokenizerMetricsCollector.__init__"
_FINISHED_CHUNK = "sglang.srt.managers.tokenizer_manager.TokenizerManager.collect_metrics"
_TPOT = "histogram_request_time_per_output_token"  # the collector's attribute in 0.5.23

REQUESTS = Feature(
    "metrics of requests",
    remove_when="SGLang counts verify steps by accepted drafts; it has the time per output token since 0.5.23",
    optional=True,
)
ENGINE = Feature(  # required: it says which optional features are missing
    "metrics of the engine", remove_when="never: SGLang knows neither the page guard nor our backends"
)


def _harmless(hook: Callable[P, None]) -> Callable[P, None]:
    """Log an exception of a metrics hook instead of raising it, which would end the engine."""

    @functools.wraps(hook)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            logger.exception("a metric of kimi-w4a8-eagle3 failed")

    return guarded


def worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for a line of the access log about an answered scrape, which the supervisor sends all the time.

    uvicorn's arguments are client, method, path, HTTP version and status.
    """
    arguments = record.args
    if not isinstance(arguments, tuple) or len(arguments) != 5:
        return True
    return not (str(arguments[2]).startswith(("/metrics", "/health")) and arguments[4] == 200)


@REQUESTS.after(_TOKENIZER_COLLECTOR)
@_harmless
def define_request_metrics(
    _: None, collector: TokenizerMetricsCollector, server_args: ServerArgs | None = None, *__: object, **___: object
) -> None:
    """Define the metrics in the tokenizer's process, where every request is counted once, with any number of ranks."""
    from prometheus_client import Counter, Histogram  # it reads its environment when imported: see above

    logging.getLogger("uvicorn.access").addFilter(worth_a_line)

    collector.kimi_spec_steps = (getattr(collector, "_counter_cls", None) or Counter)(
        name="kimi_spec_steps_total",
        documentation="Verify steps of finished requests by number of accepted draft tokens.",
        labelnames=[*collector.labels, "accepted"],
    )
    # The series begin at zero so that a rate includes the first requests. Without speculation there are none.
    for accepted in range(getattr(server_args, "speculative_num_draft_tokens", None) or 0):
        collector.kimi_spec_steps.labels(**collector.labels, accepted=accepted)
    if not hasattr(collector, _TPOT):
        collector.kimi_tpot = (getattr(collector, "_histogram_cls", None) or Histogram)(
            name="sglang:request_time_per_output_token_seconds",
            documentation="Time per output token of a request in seconds, without its first token.",
            labelnames=[*collector.labels, "is_streaming"],
            buckets=collector.histogram_inter_token_latency._upper_bounds,  # as in 0.5.23
        )


@REQUESTS.around(_FINISHED_CHUNK)
def count_clients(
    original: Callable[..., None], manager: TokenizerManager, state: ReqState, output: BatchStrOutput, index: int
) -> None:
    """Count the requests of clients, not the canary's; SGLang calls this for every output chunk of every request."""
    if str(state.obj.rid).startswith(UNCOUNTED):
        return
    original(manager, state, output, index)
    if state.finished:
        count_request(manager, state, output, index)


@_harmless
def count_request(manager: TokenizerManager, state: ReqState, output: BatchStrOutput, index: int) -> None:
    """Count a finished request."""
    collector = manager.metrics_collector
    histograms = getattr(output, "spec_correct_drafts_histogram", None) or ()
    if index < len(histograms):
        for accepted, steps in enumerate(histograms[index] or ()):
            collector.kimi_spec_steps.labels(**collector.labels, accepted=accepted).inc(steps)
    tokens = output.completion_tokens[index]
    ended = (output.finished_reasons[index] or {}).get("type") in ("stop", "length")
    if hasattr(collector, "kimi_tpot") and ended and tokens > 1:
        streaming = "true" if getattr(state.obj, "stream", False) else "false"
        time_s = state.time_stats.get_decode_latency() / (tokens - 1)
        collector.kimi_tpot.labels(**collector.labels, is_streaming=streaming).observe(time_s)


@ENGINE.after(f"{_COLLECTORS}.SchedulerMetricsCollector.emit_constants")
@_harmless
def emit_constants(
    _: None, collector: SchedulerMetricsCollector, *__: object, max_total_num_tokens: int, **___: object
) -> None:
    """Set the gauges once per scheduler after loading; each rank has its own labels, as for SGLang's gauges."""
    if getattr(collector, "kimi_constants_emitted", False):
        return
    collector.kimi_constants_emitted = True
    pool = _gauge(collector, "kimi_page_guard_pool_tokens", "Tokens in the KV pool that target and draft share.")
    pool.labels(**collector.labels).set(max_total_num_tokens)
    from ..memory.page_guard_hook import known_limit  # start-up: imports SGLang, which the other metrics do not need

    limit = known_limit()
    if limit is not None:
        text = "Tokens that every paged kernel can index with 32-bit offsets; absent where nothing limits the pool."
        _gauge(collector, "kimi_page_guard_cap_tokens", text).labels(**collector.labels).set(limit)
    info = _gauge(collector, "kimi_moe_backend_info", "1 for each W4A8 MoE backend in use.", "backend")
    for backend in sorted(selected_backends()):
        info.labels(**collector.labels, backend=backend).set(1)
    missing = _gauge(collector, "kimi_missing_feature_info", "1 for each feature that this engine lacks.", "feature")
    for feature in missing_features:
        missing.labels(**collector.labels, feature=feature).set(1)


def _gauge(collector: SchedulerMetricsCollector, name: str, documentation: str, *extra: str) -> Gauge:
    from prometheus_client import Gauge  # it reads its environment when imported: see above

    return (getattr(collector, "_gauge_cls", None) or Gauge)(
        name=name,
        documentation=documentation,
        labelnames=[*collector.labels, *extra],
        multiprocess_mode="mostrecent",  # each rank's process sets it once, so a process id label is useless
    )

"""Load figures of an engine: their window, and /status and the live page of a real ops endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from support.fleet_views import HandmadeFleet, replica

from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.ops.endpoint import OpsServer
from kimi_w4a8_eagle3.ops.replica_state import Phase
from kimi_w4a8_eagle3.ops.window import SPAN_S, AcceptanceWindow, Figures, FiguresWindow

TTFT = 'sglang:time_to_first_token_seconds_{}{{is_streaming="{}"}} {}\n'


def reading(decoded: int, cached: int, computed: int, waits: Sequence[float] = (), gaps: float = 0.0) -> Reading:
    tokens = {"decode": decoded, "prefill_cache": cached, "prefill_compute": computed}
    text = "".join(f'sglang:realtime_tokens_total{{mode="{mode}"}} {count}\n' for mode, count in tokens.items())
    text += "sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\n"
    text += 'sglang:token_usage{tp_rank="0"} 0.25\nsglang:token_usage{tp_rank="1"} 0.5\n'
    for streams, some in (("true", waits[::2]), ("false", waits[1::2])):
        text += TTFT.format("sum", streams, sum(some)) + TTFT.format("count", streams, len(some))
    text += f"sglang:inter_token_latency_seconds_sum {gaps}\nsglang:inter_token_latency_seconds_count {decoded}\n"
    return Reading.parse(text)


def test_rates_and_means_are_of_the_window() -> None:
    window, waits = FiguresWindow(span_s=30.0), [0.5] * 5
    assert window.figures(0.0) is None
    window.add(10.0, reading(100, 10, 50, waits, 1.0))
    waits += [0.9, 0.02, 0.9, 0.04]  # 0.9: of whole answers, which have no first token
    window.add(12.0, reading(160, 40, 60, waits, 1.6))
    ttft, tpot = pytest.approx(30.0), pytest.approx(10.0)  # all below the first bound of SGLang's buckets, 0.1 s
    assert window.figures(12.0) == Figures(4, 1, 0.5, 30.0, 0.75, ttft, tpot)
    window.add(43.0, reading(170, 40, 60, waits, 1.6))  # the first sample is too old
    assert window.figures(43.0) == Figures(4, 1, 0.5, pytest.approx(10 / 31), None, None, 0.0)
    assert window.figures(73.0) is None  # the engine has not answered for half a minute


def test_a_window_is_as_long_as_its_span_when_samples_are_late() -> None:
    window = FiguresWindow()
    for number, decoded in enumerate((0, 0, 500, 600)):
        window.add(5.03 * number, reading(decoded, 0, 0))
    assert window.figures(15.1).output_tok_s == pytest.approx(600 / 10.06)  # type: ignore[union-attr]


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    window = FiguresWindow()
    window.add(10.0, reading(100, 0, 50))
    window.add(12.0, reading(60, 0, 0))
    assert window.figures(12.0) == Figures(4, 1, 0.5, None, None, None, None)
    window.add(14.0, reading(120, 0, 0))
    assert window.figures(14.0).output_tok_s == 30.0  # type: ignore[union-attr]


def test_an_endpoint_shows_its_figures_and_a_live_page() -> None:
    registry, port = CollectorRegistry(), free_port()
    Gauge("sglang:num_running_reqs", "Running.", registry=registry).set(2)
    Counter("sglang:realtime_tokens", "Tokens.", ["mode"], registry=registry).labels("decode").inc(5)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    url = f"http://127.0.0.1:{port}"  # of the second, too, so that there are figures of the time before it went
    fleet = HandmadeFleet([replica("0", url), replica("1", url, Phase.DOWN, "it went away")])
    try:
        with OpsServer("127.0.0.1", free_port(), fleet) as ops:
            status = httpx.get(f"{ops.base_url}/status").json()
            page = httpx.get(f"{ops.base_url}/")
    finally:
        server.shutdown()
        thread.join()
    assert page.text.count(f"{SPAN_S:.0f} s") == 3 and f"{AcceptanceWindow(4)._span_s:.0f} s" in page.text
    alive, gone = status["replicas"]
    assert (alive["name"], alive["phase"], alive["figures"]["running"]) == ("0", "ready", 2)
    assert (gone["name"], gone["phase"], gone["figures"]) == ("1", "down", None)
    assert gone["history"][-1]["reason"] == "it went away" and isinstance(status["gpus"], list)
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert not re.search(r"https?://|innerHTML|//cdn", page.text)  # one file, and values are never markup

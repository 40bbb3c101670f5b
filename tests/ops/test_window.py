"""Acceptance and load of an engine over a window of samples, whatever their times and restarts are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms
from kimi_w4a8_eagle3.ops.window import ACCEPTANCE_SPAN_S, SPAN_S, Figures, Window, spec_steps

TTFT = 'sglang:time_to_first_token_seconds_{}{{is_streaming="{}"}} {}\n'


def reading(
    decoded: int = 0, cached: int = 0, computed: int = 0, waits: Sequence[float] = (), gaps: float = 0.0,
    steps: Sequence[int] = (),
) -> Reading:  # fmt: skip
    tokens = {"decode": decoded, "prefill_cache": cached, "prefill_compute": computed}
    text = "".join(f'sglang:realtime_tokens_total{{mode="{mode}"}} {count}\n' for mode, count in tokens.items())
    text += "sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\n"
    text += 'sglang:token_usage{tp_rank="0"} 0.25\nsglang:token_usage{tp_rank="1"} 0.5\n'
    for streams, some in (("true", waits[::2]), ("false", waits[1::2])):
        text += TTFT.format("sum", streams, sum(some)) + TTFT.format("count", streams, len(some))
    text += f"sglang:inter_token_latency_seconds_sum {gaps}\nsglang:inter_token_latency_seconds_count {decoded}\n"
    text += "".join(f'kimi_spec_steps_total{{accepted="{k}"}} {count}\n' for k, count in enumerate(steps))
    return Reading.parse(text)


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[float, tuple[int, ...], bool]]:
    """(time, running totals, True after a restart) of an engine that restarts now and then."""
    totals, now, taken = [0, 0, 0, 0], 0.0, []
    for wait in draw(st.lists(st.floats(0.1, 40), min_size=1, max_size=20)):
        now += wait
        added = draw(st.tuples(*[st.integers(0, 50)] * 4))
        # A restart shows when it had counted more than the new process has by the next sample.
        if restarted := totals[0] > added[0] and draw(st.booleans()):
            totals = [0, 0, 0, 0]
        totals = [total + more for total, more in zip(totals, added, strict=True)]
        taken.append((now, tuple(totals), restarted))
    return taken


@given(samples())
def test_the_window_is_what_one_engine_counted_in_it(taken: list) -> None:
    window = Window(4)
    for index, (now, totals, _) in enumerate(taken):
        window.add(now, reading(steps=totals))
        first = max(at for at in range(index + 1) if at == 0 or taken[at][2])
        before = [at for at in range(first, index + 1) if taken[at][0] <= now - ACCEPTANCE_SPAN_S]
        begin = taken[before[-1] if before else first][1]
        gained = [late - early for late, early in zip(totals, begin, strict=True)]
        assert window.acceptance(now) == acceptance_from_histograms([gained], 4)


def test_no_acceptance_without_a_verify_step_in_the_last_minute() -> None:
    window = Window(4)
    assert window.acceptance(0) is None
    window.add(0, reading(steps=(5, 5, 5, 5)))
    assert window.acceptance(0) is None  # how long ago those steps were is not known
    window.add(5, reading(steps=(5, 5, 5, 9)))
    assert window.acceptance(5).length == 4.0
    window.add(10, reading(steps=(5, 5, 5, 9)))
    assert window.acceptance(64).steps == 4
    assert window.acceptance(70) is None  # the engine has not answered for a minute
    window.add(69, reading(steps=(5, 5, 5, 9)))
    assert window.acceptance(70) is None


def test_totals_are_read_from_an_exposition() -> None:
    text = """\
# TYPE kimi_spec_steps_total counter
kimi_spec_steps_total{accepted="3",model_name="m"} 7
kimi_spec_steps_total{accepted="0",model_name="m"} 2
"""
    assert spec_steps(Reading.parse(text)) == (2, 0, 0, 7)
    assert spec_steps(Reading.parse("")) == ()


def test_rates_and_means_are_of_the_window() -> None:
    window, waits = Window(), [0.5] * 5
    assert window.figures(0.0) is None
    window.add(10.0, reading(100, 10, 50, waits, 1.0))
    waits += [0.9, 0.02, 0.9, 0.04]  # 0.9: of whole answers, which have no first token
    window.add(12.0, reading(160, 40, 60, waits, 1.6))
    ttft, tpot = pytest.approx(30.0), pytest.approx(10.0)  # all below the first bound of SGLang's buckets, 0.1 s
    assert window.figures(12.0) == Figures(4, 1, 0.5, 30.0, 0.75, ttft, tpot)
    window.add(23.0, reading(170, 40, 60, waits, 1.6))  # the first sample is too old
    assert window.figures(23.0) == Figures(4, 1, 0.5, pytest.approx(10 / 11), None, None, 0.0)
    assert window.figures(23.0 + SPAN_S) is None  # the engine has not answered for as long as the window is


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    window = Window(4)
    window.add(10.0, reading(100, 0, 50, steps=(3, 10)))
    window.add(12.0, reading(60, steps=(4, 1)))  # the first series alone would look like growth
    assert window.figures(12.0) == Figures(4, 1, 0.5, None, None, None, None) and window.acceptance(12.0) is None
    window.add(14.0, reading(120, steps=(4, 4)))
    assert window.figures(14.0).output_tok_s == 30.0  # type: ignore[union-attr]
    assert window.acceptance(14.0).steps == 3

"""Acceptance of the last minute from counters: exact over any pattern of samples and restarts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms
from kimi_w4a8_eagle3.ops.window import AcceptanceWindow, increase, spec_steps

SPAN_S = 60.0


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """(time, running totals, what was added since the sample before) of an engine that restarts now and then."""
    totals, now, taken = [0, 0, 0, 0], 0.0, []
    for wait in draw(st.lists(st.floats(0.1, 40), min_size=1, max_size=20)):
        now += wait
        added = draw(st.tuples(*[st.integers(0, 50)] * 4))
        # A restart shows when it had counted more than the new process has by the next sample.
        if totals[0] > added[0] and draw(st.booleans()):
            totals = [0, 0, 0, 0]
        totals = [total + more for total, more in zip(totals, added, strict=True)]
        taken.append((now, tuple(totals), added))
    return taken


@given(samples())
def test_the_window_is_the_sum_of_what_was_added_in_it(taken: list) -> None:
    window = AcceptanceWindow(4, SPAN_S)
    for index, (now, totals, _) in enumerate(taken):
        window.add(now, totals)
        recent = [added for at, _, added in taken[1 : index + 1] if at > now - SPAN_S]
        assert window.acceptance(now) == acceptance_from_histograms(recent, 4)


def test_no_acceptance_without_a_verify_step_in_the_last_minute() -> None:
    window = AcceptanceWindow(4)
    assert window.acceptance(0) is None
    window.add(0, (5, 5, 5, 5))
    assert window.acceptance(0) is None  # how long ago those steps were is not known
    window.add(5, (5, 5, 5, 9))
    assert window.acceptance(5).length == 4.0
    window.add(10, (5, 5, 5, 9))
    assert window.acceptance(64).steps == 4
    assert window.acceptance(65) is None


def test_totals_are_read_from_an_exposition() -> None:
    text = """\
# TYPE kimi_spec_steps_total counter
kimi_spec_steps_total{accepted="3",model_name="m"} 7
kimi_spec_steps_total{accepted="0",model_name="m"} 2
"""
    assert spec_steps(Reading.parse(text)) == (2, 0, 0, 7)
    assert spec_steps(Reading.parse("")) == ()


def test_a_restart_counts_all_series_from_zero() -> None:
    earlier, later = (3, 10), (4, 1)  # the first entry alone would look like growth
    assert increase(later, earlier) == later
    assert increase(later, ()) == later
    assert increase((), ()) == ()


def test_an_unknown_depth_is_read_off_the_series() -> None:
    window = AcceptanceWindow(None, SPAN_S)
    window.add(0, (0, 0, 0, 0))
    window.add(1, (0, 0, 0, 2))
    assert window.acceptance(1).per_position == pytest.approx((1.0, 1.0, 1.0))
    refused = AcceptanceWindow(None, SPAN_S)
    refused.add(0, ())
    refused.add(1, (3,))  # no draft token was ever accepted
    assert refused.acceptance(1).length == 1.0

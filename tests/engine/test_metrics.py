"""Acceptance from counters and from per-request histograms."""

from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback import answering

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import acceptance_from_histograms
from kimi_w4a8_lab.base.counters import Counters, acceptance_from_counters, scrape

EXPOSITION = """\
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 100.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 24.0
# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 7.0
# TYPE sglang:spec_verify_calls counter
sglang:spec_verify_calls_total{model_name="m"} 40.0
# TYPE sglang:num_requests counter
sglang:num_requests_total{is_streaming="false",model_name="m"} 3.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 1.0
"""


def test_counters_are_summed_over_labels():
    assert Counters.of(Reading.parse(EXPOSITION)) == Counters(124, 7, 40, 4)
    assert Counters.of(Reading.parse("")) == Counters(0, 0, 0, 0)


def test_accept_length_takes_the_prefill_token_off():
    found = acceptance_from_counters(Counters(124, 7, 40, 4), num_draft_tokens=4)
    assert found is not None
    assert (found.length, found.rate, found.steps) == (3.0, pytest.approx(2 / 3), 40)
    assert acceptance_from_counters(Counters(124, 7, 0, 4), num_draft_tokens=4) is None
    one = acceptance_from_counters(Counters(3, 7, 1, 1), num_draft_tokens=4)
    assert one is not None and (one.length, one.steps) == (2.0, 1)


ANSWERS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), min_size=1, max_size=5)  # tokens of each step


@given(ANSWERS, st.integers(0, 3))
def test_no_screen_shows_more_than_the_draft_tokens(answers, cut):
    """The last step of an answer may commit less than it accepted, where the answer is at its limit."""
    steps = sum(map(len, answers))
    sent = [1 + max(sum(answer) - cut, len(answer) - 1) for answer in answers]  # the prefill's token, then the steps'
    counted = acceptance_from_counters(Counters(sum(sent), 7, steps, len(answers)), num_draft_tokens=4)
    histograms = [[answer.count(tokens) for tokens in (1, 2, 3, 4)] for answer in answers]
    for found in (counted, acceptance_from_histograms(histograms, num_draft_tokens=4)):
        assert found is not None and found.length <= 4


def test_a_restart_between_two_readings_is_an_error():
    with pytest.raises(KimiError, match="backwards"):
        Counters(5, 0, 0, 0).since(Counters(9, 0, 0, 0))
    assert Counters(5, 4, 3, 2, 1).since(Counters(5, 2, 3, 1, 1)) == Counters(0, 2, 0, 1, 0)


@given(st.lists(st.lists(st.integers(0, 20), max_size=4), max_size=5))
def test_histograms_agree_with_counting_steps(histograms):
    """Every verify step that accepts k drafts commits k + 1 tokens and accepts positions 1 to k."""
    steps = [k for histogram in histograms for k, count in enumerate(histogram) for _ in range(count)]
    found = acceptance_from_histograms(histograms, num_draft_tokens=4)
    if not steps:
        assert found is None
        return
    assert found is not None and found.steps == len(steps)
    assert found.length == pytest.approx(sum(k + 1 for k in steps) / len(steps))
    assert found.rate == pytest.approx(sum(steps) / (3 * len(steps)))
    assert found.per_position == pytest.approx([sum(k >= i for k in steps) / len(steps) for i in (1, 2, 3)])


def ops(text: str, status: int) -> AbstractContextManager[str]:
    """An ops endpoint that redirects, as SGLang does, which mounts an application there."""
    return answering(lambda path, _: (307, b"", "/metrics/") if path == "/metrics" else (status, text.encode()))


@pytest.mark.parametrize(("text", "status", "found"), [("no such page", 404, "HTTP 404"), ("x{", 200, "no metrics: ")])
def test_what_is_no_exposition_and_no_server_is_one_message(text, status, found):
    with ops(text, status) as base_url, pytest.raises(KimiError, match=found):
        scrape(Address(base_url))
    with pytest.raises(KimiError, match="no metrics"):
        scrape(Address("http://127.0.0.1:9"))

"""The comparison without a rule for ties, on recorded answers; real servers are in tests/e2e."""

import math
from dataclasses import replace

import pytest

from kimi_w4a8_lab.accuracy.tokens import Tokens
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_laptop import exact

ASKED = [exact.ExactRequest("chat", (1, 2), {})]
SIDE = exact.ComparedServer(Target(recipe="tiny"), "EAGLE3", speculates=True, caches=True, retracts=True)
ANSWER = Tokens((7, 5, 9), "abc", "stop", (((-0.1, 7), (-2.4, 8)), ((-0.69, 5), (-0.75, 6)), ((-0.01, 9), (-5.0, 4))))


def only(found: Tokens) -> exact.Difference:
    (difference,) = exact.differences(ASKED, [ANSWER], [found], "EAGLE3", 40)
    return difference


def test_the_same_answer_differs_in_nothing_whatever_it_took():
    assert exact.differences(ASKED, [ANSWER], [replace(ANSWER, verify_steps=2, cached=1)], "EAGLE3", 40) == []


def test_one_bit_of_one_logprob_is_a_difference():
    top = (*ANSWER.top[:2], ((math.nextafter(-0.01, 0), 9), (-5.0, 4)))
    found = only(replace(ANSWER, top=top))
    assert (
        found.position == 2 and "logprobs" in found.what and "token 2" in str(found) and "concurrency 40" in str(found)
    )


def test_another_token_is_a_difference_where_it_stands():
    assert only(replace(ANSWER, ids=(7, 6, 9), top=ANSWER.top)).position == 1
    shorter = only(replace(ANSWER, ids=(7, 5), top=ANSWER.top[:2]))
    assert shorter.position == 2 and "apart" in shorter.what


def test_a_stop_string_that_cuts_late_is_a_difference():
    found = only(replace(ANSWER, text="abcd"))
    assert found.position is None and "'abcd'" in found.what and "the end" in str(found)
    assert only(replace(ANSWER, finish_reason="length")).position is None


def test_a_refused_request_is_compared_like_an_answer():
    refused = Tokens((), "the prompt is too long", exact.REFUSED)
    assert exact.differences(ASKED, [refused], [refused], "EAGLE3", 8) == []
    assert "too long" in only(refused).what and exact.REFUSED in only(refused).what
    (other,) = exact.differences(ASKED, [refused], [replace(refused, text="the prompt is empty")], "EAGLE3", 8)
    assert "too long" in other.what and "empty" in other.what


def judged(differences=(), kinds=("chat",), longest=2, **seen: float) -> exact.ExactReport:
    counted = {
        "verify steps": 4,
        "tokens of verify steps": 9,
        "prompt tokens from the cache": 3,
        "retracted": 1,
        **seen,
    }
    report = exact.ExactReport(Verdict.PASS, [], 1, 3, list(differences), {"EAGLE3": counted})
    asked = [exact.ExactRequest(kind, tuple(range(longest)), {}) for kind in kinds]
    exact._judge(report, [SIDE], asked, exact.ExactPlan())
    return report


def test_what_did_not_happen_was_not_compared():
    assert judged().state == "pass"
    for name, value, words in (
        ("tokens of verify steps", 4, "no draft token was accepted"),
        ("prompt tokens from the cache", 0, "prefix cache"),
        ("retracted", 0, "no request was retracted"),
    ):
        report = judged(**{name: value})
        assert report.state == "invalid" and any(words in reason for reason in report.reasons), name
    assert judged(kinds=("very long",), longest=4000).state == "invalid"
    assert judged(kinds=("very long",), longest=4001).state == "pass"


@pytest.mark.parametrize("retracted", [0, 1])
def test_a_difference_fails_whatever_else_is_missing(retracted):
    report = judged([only(replace(ANSWER, ids=(7, 6, 9)))], retracted=retracted)
    assert report.state == "fail" and any("found (6, 9)" in reason for reason in report.reasons)

"""Verdicts on outcomes: validity, published values, a baseline, the problems that differ."""

import pytest
import scipy  # it imports `scipy.stats` at its first use, which takes a second

from kimi_w4a8_lab.accuracy import significance
from kimi_w4a8_lab.accuracy.judge import judge, load_references
from kimi_w4a8_lab.accuracy.results import ProblemOutcome, Reference, not_worse
from kimi_w4a8_lab.accuracy.significance import REPORTED_MARGIN
from kimi_w4a8_lab.accuracy.tasks import METRICS
from kimi_w4a8_lab.base.verdict import Verdict

N = 1319


def outcome(number, solved=True, strict=None, status="answered", text="#### 1", why_empty=""):
    correct = {METRICS[0]: solved, METRICS[1]: solved if strict is None else strict}
    extracted = dict.fromkeys(METRICS, "1")
    return ProblemOutcome(
        number, f"question {number}", "1", status, text, extracted, correct, 5, 1, 0.1, None, why_empty
    )


def run(wrong=(), n=N, **changes):
    return [outcome(i, i not in wrong, **changes.get(f"p{i}", {})) for i in range(n)]


@pytest.mark.parametrize("wrong", [0, 79, N])
def test_without_a_comparison_the_run_is_measured_and_not_judged(wrong):
    verdict = judge(run(wrong=range(wrong)))
    assert verdict.state is Verdict.MEASURED and "nothing to compare with" in verdict.reasons[-1]


def test_failed_requests_leave_the_accuracy_alone_and_make_a_run_invalid_above_one_percent():
    few = [outcome(i, solved=False, status="failed", text="") if i < 13 else outcome(i) for i in range(N)]
    verdict = judge(few)
    assert verdict.state == "measured" and verdict.failed == 13
    assert verdict.accuracies[0].interval.value == 1.0  # not scored as wrong
    many = [outcome(i, solved=False, status="failed", text="") if i < 14 else outcome(i) for i in range(N)]
    assert judge(many).state == "invalid"
    assert "14 requests failed" in judge(many).reasons[0]


def test_cut_answers_count_towards_validity_and_are_scored():
    cut = [outcome(i, solved=False, status="truncated", text="...") if i < 20 else outcome(i) for i in range(N)]
    verdict = judge(cut)
    assert verdict.state == "invalid" and verdict.truncated == 20
    assert verdict.accuracies[0].correct == N - 20
    assert judge(cut, max_unusable=0.05).state == "measured"


@pytest.mark.parametrize(
    ("n", "right", "state"),
    [
        (N, 1235, "pass"),
        (N, 1218, "pass"),  # the fewest that pass; the published run had 1,235
        (N, 1217, "inconclusive"),
        (N, 1210, "fail"),
        (N, 1279, "pass"),
        (20, 17, "inconclusive"),
        (20, 20, "inconclusive"),
        (20, 0, "fail"),
    ],
)
def test_against_a_published_value(n, right, state):
    """Not worse by three points must be shown: that nothing worse was shown is no pass."""
    verdict = judge(run(wrong=range(n - right), n=n), [Reference("x", METRICS[0], 0.9363, N, "s")], "x")
    assert verdict.state == state and len(verdict.reasons) == 1
    words = {"pass": ": not worse", "fail": ": worse", "inconclusive": "undecided, the interval allows both"}[state]
    assert ("raise --limit, or give" in verdict.reasons[0]) is (state == "inconclusive")
    assert words in verdict.reasons[0] and "against x's 93.63%, margin 3 points" in verdict.reasons[0]


def test_all_published_values_are_shown_and_one_configuration_judges():
    verdict = judge(run(wrong=range(87)), load_references(), "eagle3-opt")
    assert len(verdict.references) == 7 and len(verdict.reasons) == len(METRICS)


@pytest.mark.parametrize(("loss", "passes"), [(0.0, 0.97), (0.03, 0.02)])
def test_the_margin_separates_an_equal_server_from_one_that_lost_three_points(loss, passes):
    """By the sum over all outcomes of 1,319 problems, as docs/eval.md says."""
    chances = scipy.stats.binom(N, 0.9363 - loss).pmf(range(N + 1))
    shown = [not_worse(significance.share_difference(k, N, 1235, N), REPORTED_MARGIN) for k in range(N + 1)]
    assert sum(p for p, v in zip(chances, shown, strict=True) if v is Verdict.PASS) == pytest.approx(passes, abs=0.005)


def test_equal_runs_are_not_inferior_on_the_full_set_and_inconclusive_on_forty_problems():
    full = judge(run(wrong={1, 2}), baseline=run(wrong={1, 2}))
    assert full.state == "pass" and full.differing == []
    few = judge(run(n=40), baseline=run(n=40))
    assert few.state == "inconclusive"
    assert few.paired[0].needed > 40 and few.paired[0].power < 0.8


def test_a_worse_run_fails_and_lists_the_problems_that_only_the_baseline_solves():
    verdict = judge(run(wrong=range(60)), baseline=run(wrong={0, 700}))
    assert verdict.state == "fail"
    paired = verdict.paired[0]
    assert (paired.only_new, paired.only_base, paired.neither, paired.both) == (1, 59, 1, N - 61)
    assert paired.mcnemar_p < 1e-10 and paired.difference.high < 0
    listed = {int(row[0]): row for row in verdict.differing}
    assert set(listed) == set(range(1, 60)) | {700}
    assert listed[700][3] == "flexible-extract: new, strict-match: new"
    assert listed[5][1:4] == ["question 5", "1", "flexible-extract: baseline, strict-match: baseline"]


def test_each_metric_is_compared_alone_with_the_power_of_its_observed_differences():
    new, base = run(wrong={7, 8}, p9={"strict": False}), run(wrong={0, 1, 2}, p3={"strict": False})
    loose, strict = judge(new, baseline=base).paired
    assert (loose.only_new, loose.only_base, loose.both, loose.neither) == (3, 2, N - 5, 0)
    assert (strict.only_new, strict.only_base, strict.both, strict.neither) == (4, 3, N - 7, 0)
    for paired in (loose, strict):
        assert paired.difference.value == pytest.approx(1 / N)
        seen = (paired.only_new + paired.only_base + 1) / (N + 1)
        assert paired.power == significance.noninferiority_power(N, seen, 0.01)
        assert paired.needed == significance.problems_needed(seen, 0.01)


def test_a_loss_within_the_margin_is_no_worse_even_when_it_is_significant():
    verdict = judge(run(wrong=range(6)), baseline=run())
    assert verdict.paired[0].mcnemar_p < 0.05 and verdict.state == "pass"
    worse = judge(run(**{f"p{i}": {"strict": False} for i in range(60)}), baseline=run())
    assert [paired.verdict for paired in worse.paired] == ["pass", "fail"] and worse.state == "fail"


def test_problems_that_failed_in_one_run_are_not_compared():
    failed = [outcome(i, solved=False, status="failed") if i < 5 else outcome(i) for i in range(N)]
    assert judge(failed, baseline=run()).paired[0].n == N - 5
    assert judge(run(), baseline=failed).paired[0].n == N - 5
    assert judge(run(n=3), baseline=[outcome(99)]).state == "invalid"


def test_the_baseline_may_hold_the_problems_in_another_order_or_lack_some():
    verdict = judge(run(wrong={3}), baseline=list(reversed(run(wrong={3})))[:1000])
    assert verdict.paired[0].n == 1000 and verdict.paired[0].only_new == 0


@pytest.mark.parametrize(("empty", "state"), [(1, "measured"), (2, "invalid")])
def test_too_many_empty_answers_are_invalid_and_name_the_cause(empty: int, state: str) -> None:
    blank = {"solved": False, "text": " ", "why_empty": "no text came; add --chat"}
    verdict = judge([outcome(i, **(blank if i < empty else {})) for i in range(100)])
    assert (verdict.state, verdict.empty) == (state, empty)
    assert ("are empty: 2.0% of 100, more than 1.0%. Without text: no text came; add --chat" in verdict.reasons[0]) == (
        state == "invalid"
    )


def test_without_answers_there_is_no_accuracy_and_no_comparison():
    verdict = judge([outcome(i, status="failed") for i in range(3)], load_references(), "eagle3-opt")
    assert verdict.state == "invalid" and verdict.references == []
    assert [(accuracy.answered, accuracy.interval) for accuracy in verdict.accuracies] == [(0, None)] * 2


def test_each_verdict_has_its_exit_code():
    codes = {"pass": 0, "fail": 3, "invalid": 4, "inconclusive": 5, "measured": 6}
    assert {verdict.value: verdict.exit_code for verdict in map(Verdict, codes)} == codes
    assert f"{Verdict.MEASURED}" == "measured" and Verdict.MEASURED.headline == "MEASURED, NOT JUDGED"


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [(-0.01, 0.1, "inconclusive"), (-0.0099, 0.1, "pass"), (-0.2, 0.0, "inconclusive"), (-0.2, -1e-9, "fail")],
)
def test_the_ends_of_the_interval_decide(low, high, state):
    assert not_worse(significance.ShareInterval(-0.001, low, high), 0.01) == state

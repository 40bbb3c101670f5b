"""The statistics against independent computations: enumeration, simulation, scipy, published examples."""

import math

import pytest
import scipy  # it imports `scipy.stats` at its first use, which takes a second

from kimi_w4a8_lab.accuracy import significance


def test_wilson_agrees_with_scipy_and_holds_at_the_edges():
    for correct, n in ((0, 40), (1, 40), (1, 1), (1235, 1319), (1319, 1319)):
        expected = scipy.stats.binomtest(correct, n).proportion_ci(0.95, method="wilson")
        found = significance.wilson(correct, n)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert significance.wilson(0, 40).low < 1e-12 and significance.wilson(0, 40).high > 0.05
    for correct, n in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="is not a share"):
            significance.wilson(correct, n)


def test_mcnemar_is_the_exact_binomial():
    assert significance.mcnemar_p(0, 0) == 1.0
    assert significance.mcnemar_p(0, 10) == pytest.approx(2 / 2**10)
    assert significance.mcnemar_p(7, 2) == significance.mcnemar_p(2, 7) == pytest.approx(2 * (1 + 9 + 36) / 2**9)


def brute_force_z(only_new, only_base, n, difference):
    """The score statistic with the restricted maximum of the likelihood found by search, not by formula."""
    same = n - only_new - only_base

    def loss(base_share):
        new_share = base_share + difference
        shares = ((only_new, new_share), (only_base, base_share), (same, 1 - new_share - base_share))
        return -sum(count * math.log(max(share, 1e-300)) for count, share in shares if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    share = scipy.optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * share + difference - difference**2)
    return (only_new - only_base - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize("counts", [(0, 0, 50), (0, 1, 44), (3, 9, 200), (20, 31, 1319), (12, 0, 300)])
@pytest.mark.parametrize("difference", [-0.05, -0.01, 0.02])
def test_the_score_statistic_maximises_the_likelihood(counts, difference):
    assert significance.paired_z(*counts, difference) == pytest.approx(brute_force_z(*counts, difference), rel=1e-4)


def test_the_statistic_is_critical_at_the_limits_of_the_paired_interval():
    for counts in ((0, 1, 44), (3, 9, 200), (0, 0, 300)):
        interval = significance.paired_interval(*counts)
        assert significance.paired_z(*counts, interval.low) == pytest.approx(1.6449, abs=1e-3)
        assert significance.paired_z(*counts, interval.high) == pytest.approx(-1.6449, abs=1e-3)


@pytest.mark.parametrize(("discordance", "margin"), [(0.03, 0.01), (1 / 301, 0.02), (0.2, 0.01), (0.02, 0.001)])
def test_the_problems_needed_give_the_power_asked_for(discordance, margin):
    needed = significance.problems_needed(discordance, margin)
    few, enough = (significance.noninferiority_power(n, discordance, margin) for n in (needed - 1, needed))
    assert few < 0.8 <= enough


def test_the_difference_of_two_shares_has_newcombes_interval():
    """The examples of Newcombe (1998), Statistics in Medicine 17, table II: method 10, 95 %."""
    for counts, low, high in (
        ((56, 70, 48, 80), 0.0524, 0.3339),
        ((9, 10, 3, 10), 0.1705, 0.8090),
        ((6, 7, 2, 7), 0.0582, 0.8062),
        ((5, 56, 0, 29), -0.0381, 0.1926),
        ((0, 10, 0, 10), -0.2775, 0.2775),
        ((10, 10, 0, 10), 0.6075, 1.0),
    ):
        found = significance.share_difference(*counts, confidence=0.95)
        assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
        assert found.value == counts[0] / counts[1] - counts[2] / counts[3]


def test_same_distribution_is_scipys_chi_squared_with_rare_values_pooled():
    first, second = ["a"] * 60 + ["b"] * 40, ["a"] * 45 + ["b"] * 55
    expected = scipy.stats.chi2_contingency([[60, 40], [45, 55]], correction=False).pvalue
    assert significance.same_distribution_p(first, second) == pytest.approx(expected)
    five = scipy.stats.chi2_contingency([[60, 40, 6, 1], [45, 55, 4, 3]], correction=False).pvalue
    assert significance.same_distribution_p([*first, *"eeeeeef"], [*second, *"eeeefff"]) == pytest.approx(five)
    rare, other = [f"only {i}" for i in range(20)], [f"other {i}" for i in range(11)]
    rare, other = rare + ["few"] * 3 + ["enough"] * 4, other + ["few"] * 4 + ["enough"] * 7  # 3.6 and 5.6 expected
    pooled = scipy.stats.chi2_contingency([[60, 40, 4, 23], [45, 55, 7, 15]], correction=False).pvalue
    assert significance.same_distribution_p(first + rare, second + other) == pytest.approx(pooled)
    # A third of all is in the smaller sample: of 12, 4 are expected there, so both "c" and "d" are rare.
    first, second = ["b"] * 10 + ["c"] * 6 + ["d"] * 4, ["b"] * 26 + ["c"] * 6 + ["d"] * 8
    pooled = scipy.stats.chi2_contingency([[10, 10], [26, 14]], correction=False).pvalue
    assert significance.same_distribution_p(first, second) == pytest.approx(pooled)
    assert significance.same_distribution_p(["a"] * 50, ["a"] * 50) is None

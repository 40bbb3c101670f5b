"""Repetition, speed-up curves and published verdicts: the arithmetic behind a report."""

import pytest
from support.every_page import Copies

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_lab.report import against_published
from kimi_w4a8_lab.report.analysis import Analysis
from kimi_w4a8_lab.report.changes import Direction, require_hits
from kimi_w4a8_lab.report.measured import acceptance, verdicts
from kimi_w4a8_lab.speed.measure import TurnFigures
from kimi_w4a8_lab.speed.repetition import measure, repeated_share
from kimi_w4a8_lab.speed.runs import Run
from kimi_w4a8_lab.speed.statistics import METRICS, Interval


def test_repeated_text_differs_from_prose() -> None:
    sentence = "The quick brown fox jumps over the lazy dog near the river bank. "
    assert repeated_share(sentence * 20) > 0.9
    assert repeated_share(sentence) == 0.0
    assert repeated_share(sentence, after=sentence) == 1.0
    assert measure([sentence * 20], ["something new"]).warning is not None
    assert measure([sentence], ["something new"]).warning is None


def test_sides_are_compared_with_the_first(copies: Copies) -> None:
    runs = [copies("a", "w4a8", 3.0, 3), copies("b", "eagle3", 1.1, 3), copies("c", "eagle3-opt", 1.0, 3)]
    rows = Analysis(runs).changes
    assert {(row.a, row.b) for row in rows} == {("w4a8", "eagle3"), ("w4a8", "eagle3-opt")}
    throughput = next(row for row in rows if row.b == "eagle3" and row.metric.higher_is_better)
    assert throughput.direction is Direction.BETTER and throughput.change.value == pytest.approx(3 / 1.1)


def test_one_side_has_one_accept_length_on_all_screens(copies: Copies) -> None:
    found = [Acceptance(length, (length - 1) / 3, 100) for length in (3.33, 3.41)]
    runs = [copies(str(n), "tiny", acceptance=one) for n, one in enumerate(found)]
    analysis = Analysis([copies("plain", "tiny:plain", 3.0, acceptance=None), *runs])
    said = " ".join(words.text for words in verdicts(analysis))
    ((where, length, rate, _, steps, *_),) = acceptance(analysis).rows
    assert "3.37 tokens per verify step" in said and (length, rate, steps) == ("3.37", "79.0%", "200"), where


def test_refused_measurements_are_never_averaged_in(copies: Copies) -> None:
    good, bad = copies("a", "w4a8"), copies("b", "eagle3", problems=["1 of 6 requests failed"])
    assert Analysis([good, bad]).changes == []
    assert bad.refused[0][1] == "1 of 6 requests failed"


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (Interval(43.0, 42.0, 44.0), "no difference"),
        (Interval(45.0, 44.5, 45.5), "moved by 9.2% between two days"),
        (Interval(60.0, 59.0, 61.0), "worse by 40.4%"),
        (Interval(30.0, 29.0, 31.0), "better by 29.8%"),
    ],
)
def test_the_meaning_of_a_difference_from_the_published_figure(interval: Interval, words: str) -> None:
    assert words in against_published._compared("con40", METRICS["tpot_median_ms"], 42.73, interval).meaning


def test_other_machines_are_not_compared(copies: Copies, null_run: Run) -> None:
    workload = null_run.result.measurements[0].workload.model_copy(update={"reference": "con40"})
    run = copies("a", "w4a8", workload=workload)
    (found,) = Analysis([run]).against_published.values()
    assert {comparison.meaning for comparison in found.values()} == {
        "not comparable: measured with no AMD GPU, published on 8x MI325X, TP 8"
    }
    run.record["hardware"] = {"known": True, "gpus": ["gfx942"] * 8}
    (found,) = Analysis([run]).against_published.values()
    assert found and all("not comparable" not in comparison.meaning for comparison in found.values())


@pytest.mark.parametrize(("computed", "fails"), [(50.0, False), (52.0, False), (52.5, True), (300.0, True)])
def test_speculation_may_cost_two_tokens_of_the_prefix_cache(copies: Copies, computed: float, fails: bool) -> None:
    def turns(again: float) -> list[TurnFigures]:
        first = TurnFigures(prompt_tokens=400, cached_tokens=0, ttft_median_ms=1, ttft_p99_ms=1)
        later = TurnFigures(prompt_tokens=500, cached_tokens=500 - again, ttft_median_ms=1, ttft_p99_ms=1)
        return [first, later, later]

    sides = [copies("a", "plain", turns=turns(50.0), acceptance=None), copies("b", "eagle3", turns=turns(computed))]
    groups = Analysis(sides).groups
    if fails:
        with pytest.raises(KimiError, match="lowers the hit rate"):
            require_hits(groups)
    else:
        require_hits(groups)

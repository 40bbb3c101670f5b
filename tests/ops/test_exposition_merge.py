"""Merging expositions loses nothing, declares nothing twice and gives a valid exposition."""

from collections import Counter as Count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kimi_w4a8_eagle3.base.prometheus import Exposition, merge, parse, render

LABEL_VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6) | st.just('a\\"\n{}, b')
NUMBERS = st.floats(0, 1e9, allow_nan=False)


@st.composite
def expositions(draw: st.DrawFn) -> str:
    """A real exporter's text: names with SGLang's colons, and a counter, a gauge and a histogram with labels."""
    registry = CollectorRegistry()
    counter = Counter("sglang:tokens_total", "Tokens.", ["model", "replica"], registry=registry)
    gauge = Gauge("sglang:running", "Requests\nnow \\.", ["model"], registry=registry)
    histogram = Histogram("ttft_seconds", "Time.", ["model"], buckets=(0.1, 1.0), registry=registry)
    for model in draw(st.lists(LABEL_VALUES, max_size=3, unique=True)):
        counter.labels(model, draw(LABEL_VALUES)).inc(draw(NUMBERS))
        gauge.labels(model).set(draw(NUMBERS))
        for value in draw(st.lists(st.floats(0, 2), max_size=4)):
            histogram.labels(model).observe(value)
    return generate_latest(registry).decode()


def totals(text: str) -> dict[str, float]:
    """Sum of the samples of each name, without what prometheus_client adds about itself."""
    sums: Count[str] = Count()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)


@given(st.lists(expositions(), max_size=4))
def test_sums_are_kept_and_every_family_is_declared_once(texts: list[str]) -> None:
    merged = render(merge(Exposition(parse(text), {"replica": str(i)}) for i, text in enumerate(texts))).decode()
    expected: Count[str] = Count()
    for text in texts:
        expected.update(totals(text))
    assert totals(merged) == pytest.approx(dict(expected))
    declared = [line for line in merged.splitlines() if line.startswith(("# TYPE", "# HELP"))]
    assert len(declared) == len(set(declared)) == 2 * len({line.split()[2] for line in declared})
    for family in parse(merged):
        assert all(sample.labels["replica"] in map(str, range(len(texts))) for sample in family.samples)


@given(expositions())
def test_one_source_without_labels_comes_back_as_it_was(text: str) -> None:
    assert render(merge([Exposition(parse(text))])).decode() == text


def test_buckets_stay_beside_their_histogram() -> None:
    text = "# TYPE h histogram\n" + "".join(
        f"h{suffix}\n" for suffix in ('_bucket{le="1"} 1', '_bucket{le="+Inf"} 2', "_count 2", "_sum 3")
    )
    lines = render(merge([Exposition(parse(text), {"replica": r}) for r in "ab"])).decode().splitlines()
    assert [line.split("{")[0] for line in lines if not line.startswith("#")] == 2 * [
        "h_bucket", "h_bucket", "h_count", "h_sum"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# TYPE requests counter\nrequests 3\n", 'requests{replica="a"} 3.0'),
        ("# TYPE requests_total counter\nrequests_total 3\n", 'requests_total{replica="a"} 3.0'),
        ("plain 4\n", 'plain{replica="a"} 4.0'),
        ('g{replica="7"} 1\n', 'g{exported_replica="7",replica="a"} 1.0'),
    ],
    ids=["counter-without-total", "counter", "untyped", "own-replica-label"],
)
def test_names_are_kept_and_own_labels_move_aside(text: str, expected: str) -> None:
    lines = render(merge([Exposition(parse(text), {"replica": "a"})])).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [expected]


def test_a_family_of_another_type_is_left_out() -> None:
    gauge, counter = parse("# TYPE x_total gauge\nx_total 1\n"), parse("# TYPE x_total counter\nx_total 2\n")
    merged = render(merge([Exposition(counter), Exposition(gauge, {"replica": "b"})])).decode()
    assert "x_total 2.0" in merged and "replica" not in merged


def test_a_series_that_its_source_repeats_appears_once() -> None:
    merged = render(merge([Exposition(parse("# TYPE g gauge\ng 1\ng 2\n"))])).decode()
    assert [line for line in merged.splitlines() if line.startswith("g ")] == ["g 1.0"]

"""Merging expositions loses nothing, declares nothing twice and gives a valid exposition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kimi_w4a8_eagle3.base.prometheus import merge, parse, render

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


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#")]


@given(expositions())
def test_one_source_comes_back_as_it_was(text: str) -> None:
    assert render(merge(parse(text))).decode() == text


@given(expositions(), expositions())
def test_every_family_is_declared_once_and_the_first_source_wins(first: str, second: str) -> None:
    merged = render(merge(parse(first), parse(second))).decode()
    declared = [line for line in merged.split("\n") if line.startswith(("# TYPE", "# HELP"))]
    assert len(declared) == len(set(declared)) == 2 * len({line.split()[2] for line in declared})
    expected = {name: value for text in (second, first) for name, _, value in (s.rpartition(" ") for s in lines(text))}
    assert {name: value for name, _, value in (line.rpartition(" ") for line in lines(merged))} == expected


def test_buckets_stay_beside_their_histogram() -> None:
    text = "# TYPE h histogram\n" + "".join(
        f"h{suffix}\n" for suffix in ('_bucket{le="1"} 1', '_bucket{le="+Inf"} 2', "_count 2", "_sum 3")
    )
    other = text.replace("{le=", '{model="b",le=').replace("_count", '_count{model="b"}')
    found = lines(render(merge(parse(text), parse(other.replace("_sum", '_sum{model="b"}')))).decode())
    assert [line.split("{")[0].split()[0] for line in found] == 2 * ["h_bucket", "h_bucket", "h_count", "h_sum"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("# TYPE requests counter\nrequests 3\n", "requests 3.0"), ("plain 4\n", "plain 4.0")],
    ids=["counter-without-total", "untyped"],
)
def test_names_are_kept(text: str, expected: str) -> None:
    assert lines(render(merge(parse(text))).decode()) == [expected]


def test_a_family_of_another_type_is_left_out() -> None:
    counter, gauge = parse("# TYPE x_total counter\nx_total 2\n"), parse('# TYPE x_total gauge\nx_total{a="b"} 1\n')
    assert lines(render(merge(counter, gauge)).decode()) == ["x_total 2.0"]

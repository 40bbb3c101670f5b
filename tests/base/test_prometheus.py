"""Sums and labels of an exposition."""

from kimi_w4a8_eagle3.base.prometheus import Reading


def test_a_reading_sums_and_picks_by_labels() -> None:
    text = 'a{rank="0",replica="x"} 1\na{rank="1",replica="x"} 2\na{rank="0",replica="y"} 8\n'
    reading = Reading.parse(text)
    assert reading.total("a") == 11 and reading.total("a", replica="x") == 3 and reading.total("b") is None
    assert reading.largest("a") == 8 and reading.largest("a", replica="x") == 2 and reading.largest("b") is None
    assert reading.by("a", "rank") == {"0": 9, "1": 2}
    assert reading.labels("a", "replica") == ("x", "y")
    assert reading.labels("a", "replica", 8.0) == ("y",)

"""docs/figures.toml: the pages state its figures, a second value is found, and the sources have them."""

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import PROGRAM, app
from proof.figures.pages import FIGURES, PAGES, ROOT, STATEMENTS, mended, stated

TEXTS = {page: page.read_text() for page in PAGES}
CHECKED = [name for name, (_, by) in FIGURES.items() if by.startswith(PROGRAM) or (ROOT / by).is_file()]


def test_a_statement_stands_on_a_page_and_a_figure_on_two():
    found = [(line, name, page) for line in STATEMENTS for page in PAGES for name, _ in stated(TEXTS[page], line)]
    assert {line for line, *_ in found} == set(STATEMENTS)
    assert [name for name in FIGURES if len({page for _, other, page in found if other == name}) < 2] == []


def test_a_second_value_is_found_and_mended():
    for page, text in TEXTS.items():
        assert mended(text) == text, f"{page}: run `python -m proof.figures.pages`"
        for _, (start, _) in (found for line in STATEMENTS for found in stated(text, line)):
            second = f"{text[:start]}7{text[start:]}"
            assert mended(second) == text, second[start - 60 : start + 40]


@pytest.mark.parametrize("name", CHECKED)
def test_the_source_has_the_figure(name):
    value, by = FIGURES[name]
    program, *words = by.split()
    shown = CliRunner().invoke(app, words).output if program == PROGRAM else (ROOT / by).read_text()
    assert value in shown or value.rstrip("0").rstrip(".") in shown or f"{float(value) / 100:.3f}" in shown

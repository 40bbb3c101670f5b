"""`python -m proof.figures.pages`: write the figures of docs/figures.toml into the pages that state them."""

import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path

from kimi_w4a8_eagle3.base.toml import tomllib

ROOT = Path(__file__).parents[2]
_TABLE = tomllib.loads((ROOT / "docs/figures.toml").read_text())
FIGURES: dict[str, tuple[str, str]] = _TABLE["figures"]  # value and source
STATEMENTS: list[str] = _TABLE["statements"]["of"]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "docs/changelog.md"})


def stated(text: str, statement: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each figure that a statement of the page has, and where its value stands."""
    names = re.findall(r"<([a-z][\w-]+)>", statement)
    pattern = re.sub(r"(?<!\[) (?![|+*])", r"\\s+", re.sub(r"<[a-z][\w-]+>", r"(\\d[\\d,.]*(?<=\\d))", statement))
    for found in re.finditer(pattern, text):
        yield from ((name, found.span(index)) for index, name in enumerate(names, 1))


def mended(text: str) -> str:
    """Return the text of a page with the value of every figure that it states, in the decimals of the page."""
    for statement in STATEMENTS:
        for name, (start, end) in reversed([*stated(text, statement)]):
            value, old = FIGURES[name][0], text[start:end]
            with suppress(InvalidOperation):  # a version
                number = round(Decimal(value.replace(",", "")), len(old.partition(".")[2]))
                value = f"{number:,f}" if "," in old or len(old) < 4 else f"{number:f}"
            text = text[:start] + value + text[end:]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(mended(page.read_text()))

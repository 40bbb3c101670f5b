"""The page-maker: typed content to one self-contained HTML page, the same for every kind of run.

The first screen has the verdict and one chart. Sections follow. Closed ones open by a click and are not printed.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.base.installed import require

from ..base.run_folder import require_writable
from ..speed.statistics import Interval

PAGE = "report.html"
PACKAGES = ("jinja2", "matplotlib")  # of the extra `bench`
_FIRST = 4  # verdicts before the chart; the others follow it
Tone = Literal["", "better", "worse", "soft"]


@dataclass(frozen=True)
class Words:
    """Text with a colour. literal: shown in a fixed font with its line breaks."""

    text: str
    tone: Tone = ""
    literal: bool = False


@dataclass(frozen=True)
class Table:
    """Table of texts. A column that is empty in every row is not shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Words]]
    title: str = ""

    def filled(self) -> Table:
        """Return the table with text in every cell and without empty columns."""
        rows = [[Words(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        kept = [at for at in range(len(self.columns)) if any(row[at].text for row in rows)]
        return Table([self.columns[at] for at in kept], [[row[at] for at in kept] for row in rows], self.title)


@dataclass(frozen=True)
class Picture:
    """SVG image. name: of its file. alt: description in words. legend: (label, colour)."""

    name: str
    alt: str
    svg: bytes
    legend: Sequence[tuple[str, str]] = ()

    @property
    def source(self) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its group on the axis, side, published or measured, and value."""

    group: str
    side: str
    published: bool
    value: Interval


@dataclass(frozen=True)
class Section:
    """Part of a page under one heading. listings: (heading, literal text), each closed by itself."""

    title: str
    text: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    listings: Sequence[tuple[str, str]] = ()
    closed: bool = False

    @property
    def filled(self) -> bool:
        """True if there is something to show below the heading."""
        return bool(self.pictures or self.listings or any(table.rows for table in self.tables))


@dataclass(frozen=True)
class Page:
    """Page of one or several runs. title: the verdict in a line. verdicts: its reasons. notes: warnings.

    figures: lines that a terminal shows instead of the tables.
    """

    title: str
    verdicts: Sequence[Words]
    about: str = ""
    chart: Picture | None = None
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    tone: Tone = ""
    figures: Sequence[Words] = ()


def _path_in(folder: Path) -> Path:
    return folder if folder.suffix == ".html" else folder / PAGE


def require_place(folder: Path) -> None:
    """Raise KimiError now, before minutes of work, if no page could be written into `folder` later."""
    require(*PACKAGES)
    require_writable(_path_in(folder).parent)


def write_page(page: Page, folder: Path) -> Path:
    """Write the page and its pictures (SVG) into `folder`, which may end with the page's own name; return its path."""
    require("jinja2")
    path = _path_in(folder)
    from jinja2 import Environment, PackageLoader, StrictUndefined  # optional: jinja2

    templates = PackageLoader("kimi_w4a8_lab.report", ".")
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("page.html.jinja").render(page=page, first=_FIRST)
    pictures = [page.chart] if page.chart else []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for picture in (*pictures, *(shown for section in page.sections for shown in section.pictures)):
            write_atomic(path.with_name(f"{picture.name}.svg"), picture.svg)
        write_atomic(path, text)
    except OSError as error:
        raise KimiError(
            f"cannot write the page: {error.strerror}", where=str(folder), remedy="choose a folder with --output"
        ) from error
    return path


def unreadable(folder: Path, error: KimiError) -> Page:
    """Return the page of a folder whose content cannot be shown; it says what is missing."""
    notes = [f"{name}: {text}" for name, text in (("Expected", error.expected), ("To do", error.remedy)) if text]
    return Page(f"NOT SHOWN: {folder.absolute().name}", [Words(error.what)], error.where, notes=notes, tone="worse")


def joined(pages: Sequence[Page]) -> Page:
    """Return one page with the content of several. The first has the chart."""
    first, *others = pages
    return replace(
        first,
        verdicts=[*first.verdicts, *(w for page in others for w in (Words(page.title, page.tone), *page.verdicts))],
        notes=[note for page in pages for note in page.notes],
        sections=[section for page in pages for section in page.sections],
    )

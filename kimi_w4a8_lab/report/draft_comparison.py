"""Page of a comparison of two drafts."""

from __future__ import annotations

from collections.abc import Sequence

from ..draft.kinds import DraftVerdict, KindOfTraffic, overall
from ..speed.statistics import Interval
from .page import Bar, Page, Section, Table, Tone, Words
from .plots import panel

COLUMNS = ("kind of traffic", "held-out", "verify steps", "old draft", "new draft", "change", "verdict")
_TONES: dict[DraftVerdict, Tone] = {
    DraftVerdict.BETTER: "better", DraftVerdict.WORSE: "worse", DraftVerdict.NOT_SHOWN: "soft",
}  # fmt: skip


def rows(kinds: Sequence[KindOfTraffic]) -> list[list[str]]:
    """Return a row for each kind: accept lengths with 95% intervals, and the verdict."""
    return [
        [
            kind.kind, str(kind.conversations), f"{kind.steps:,}", shown(kind.old[0]), shown(kind.new[0]),
            shown(kind.change, "+.2f"), kind.verdict.value,
        ]
        for kind in kinds
    ]  # fmt: skip


def page(kinds: Sequence[KindOfTraffic], about: str, notes: Sequence[str] = ()) -> Page:
    """Return the page: accept lengths, and the shares by position, of both drafts for each kind of traffic."""
    drafts = [(kind.kind, *draft) for kind in kinds for draft in (("old draft", kind.old), ("new draft", kind.new))]
    lengths = [Bar(kind, side, False, found[0]) for kind, side, found in drafts]
    places = [
        Bar(f"{kind}, {at}", side, False, share) for kind, side, found in drafts for at, share in enumerate(found[1], 1)
    ]
    verdict = overall(kinds)
    said = [
        Words(f"{kind.kind}: {kind.verdict.value}, {shown(kind.change, '+.2f')}", _TONES[kind.verdict])
        for kind in kinds
    ]
    by_position = panel("positions", "share of verify steps that accept the draft token, by position", places)
    return Page(
        "No difference is shown" if verdict is DraftVerdict.NOT_SHOWN else f"The new draft is {verdict.value}",
        said,
        about,
        panel("accept-length", "accept length on held-out conversations (tokens per verify step)", lengths),
        notes,
        [Section("By position", pictures=[by_position]), Section("Figures", tables=[Table(COLUMNS, rows(kinds))])],
        _TONES[verdict],
    )


def shown(value: Interval, form: str = ".2f") -> str:
    """Return a value with its interval."""
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"

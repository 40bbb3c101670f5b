"""Page of a comparison of two drafts."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.verdict import Verdict
from ..draft.kinds import WORDS, KindOfTraffic, overall
from ..speed.statistics import Interval
from .page import Bar, Page, Section, Table, Tone, Words
from .plots import panel

COLUMNS = ("kind of traffic", "held-out", "verify steps", "old draft", "new draft", "change", "verdict")
_TONES: dict[Verdict, Tone] = {Verdict.PASS: "better", Verdict.FAIL: "worse"}


def rows(kinds: Sequence[KindOfTraffic]) -> list[list[str]]:
    """Return a row for each kind: accept lengths with 95% intervals, and the verdict."""
    return [
        [
            kind.kind, str(kind.conversations), f"{kind.steps:,}", shown(kind.old[0]), shown(kind.new[0]),
            shown(kind.change, "+.2f"), WORDS[kind.verdict],
        ]
        for kind in kinds
    ]  # fmt: skip


def page(kinds: Sequence[KindOfTraffic], about: str) -> Page:
    """Return the page: accept lengths, and the shares by position, of both drafts for each kind of traffic."""
    sides = [(kind.kind, *side) for kind in kinds for side in (("old draft", kind.old), ("new draft", kind.new))]
    lengths = [Bar(kind, side, False, found[0]) for kind, side, found in sides]
    places = [
        Bar(f"{kind}, {at}", side, False, share) for kind, side, found in sides for at, share in enumerate(found[1], 1)
    ]
    verdict = overall(kinds)
    said = {f"{kind.kind}: {WORDS[kind.verdict]}, {shown(kind.change, '+.2f')}": kind.verdict for kind in kinds}
    by_position = panel("positions", "share of verify steps that accept the draft token, by position", places)
    return Page(
        f"The new draft is {WORDS[verdict]}" if verdict in _TONES else "No difference shown: collect more",
        [Words(text, _TONES.get(result, "soft")) for text, result in said.items()],
        about,
        panel("accept-length", "accept length on held-out conversations (tokens per verify step)", lengths),
        sections=[
            Section("By position", pictures=[by_position]),
            Section("Figures", tables=[Table(COLUMNS, rows(kinds))]),
        ],
        tone=_TONES.get(verdict, "soft"),
    )


def shown(value: Interval, form: str = ".2f") -> str:
    """Return a value with its interval."""
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"

"""An answer has the same pieces however it is cut, and an id of a call is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from support.transcripts import ARGUMENTS, BEGIN, SECTION, Said, Transcript, transcripts

from kimi_w4a8_eagle3.gateway.reader import PartKind as Kind
from kimi_w4a8_eagle3.gateway.reader import Reader

# An id is matched again for every piece, so a model that goes on with spaces would cost the square of them.
SPACES = Transcript(f"{BEGIN}{129 * ' '}{ARGUMENTS}x", False, Said("", f"{129 * ' '}x", ()))
ENDS = [Transcript(written, False, None) for written in ("\n", f"{SECTION} ")]


def read(thinking: bool, parts: Sequence[str]) -> list[tuple[Kind, str]]:
    reader = Reader(thinking, opens=True, calls=True)
    pieces = [piece for part in parts for piece in reader.read(part)] + reader.read("", ended=True)
    return [(kind, "".join(text for _, text in same)) for kind, same in groupby(pieces, lambda piece: piece[0])]


def test_drawn_answers_have_the_same_pieces_however_they_are_cut() -> None:
    for written, thinking, said in (SPACES, *ENDS, *transcripts(60, 11)):
        pieces = read(thinking, [written])
        assert "".join(text for _, text in pieces) == written
        for parts in (written, *([written[:at], written[at:]] for at in range(len(written)))):
            assert read(thinking, parts) == pieces
        thought, text = ("".join(text for kind, text in pieces if kind is one) for one in (Kind.THOUGHT, Kind.TEXT))
        calls = [text.strip() for (_, text), (after, _) in pairwise(pieces) if after is Kind.CLOSED]
        assert said is None or (thought, text, calls) == (*said[:2], [arguments for _, arguments in said.calls])

"""The reader takes bounded steps while it waits for the end of a call's id."""

from __future__ import annotations

from kimi_w4a8_eagle3.chat.reader import PartKind, Reader


def test_white_space_after_the_begin_of_a_call_is_no_id() -> None:
    """An id is matched again for every piece, so a model that goes on with spaces would cost the square of them."""
    reader = Reader(thinking=False, opens=False, calls=True)
    pieces = reader.read("<|tool_calls_section_begin|><|tool_call_begin|>")
    for _ in range(64):
        pieces += reader.read(" ")
    assert reader._state == reader._id
    for _ in range(1000):
        pieces += reader.read(" ")
    assert reader._state == reader._words
    pieces += reader.read("", ended=True)
    assert "".join(text for _, text in pieces).count(" ") == 1064
    assert {kind for kind, _ in pieces} == {PartKind.MARKER}

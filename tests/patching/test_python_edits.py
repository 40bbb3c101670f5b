from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_trees import MHA

from kimi_w4a8_eagle3.patching.edit_state import State
from kimi_w4a8_eagle3.patching.python_edits import ParameterDefault

ROUNDING = ParameterDefault("how_v3_bf16_cvt", old=1, new=2)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_changes_every_default_and_nothing_else(newline: str) -> None:
    source = MHA.replace("\n", newline).encode()
    assert ROUNDING.inspect(source)[0] is State.ORIGINAL
    edited = ROUNDING.apply(source)
    expected = (
        source.replace(b"how_v3_bf16_cvt: int | None = 1", b"how_v3_bf16_cvt: int | None = 2")
        .replace(b"*, how_v3_bf16_cvt=1 ,", b"*, how_v3_bf16_cvt=2 ,")
        .replace(b"lambda how_v3_bf16_cvt=1", b"lambda how_v3_bf16_cvt=2")
    )
    assert edited == expected
    assert ROUNDING.inspect(edited)[0] is State.APPLIED


@pytest.mark.parametrize(
    "source",
    [
        b"def f(x=1): pass",  # no such parameter
        b"def f(how_v3_bf16_cvt): pass",  # no default
        b"def f(how_v3_bf16_cvt=0): pass",
        b"def f(how_v3_bf16_cvt=1): pass\ndef g(how_v3_bf16_cvt=2): pass",  # edited in one place only
        b"def f(how_v3_bf16_cvt=DEFAULT): pass",
        b"def f(",
        b"\xff\xfe\x00",
    ],
)
def test_an_unexpected_file_is_unknown(source: bytes) -> None:
    assert ROUNDING.inspect(source)[0] is State.UNKNOWN


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a, ", "a=1, ", "*, ", "a, /, "]), st.sampled_from(["", ": int", ": int | None"])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_mix_of_signatures_is_edited_and_comes_back(signatures: list[tuple[str, str]]) -> None:
    source = "".join(
        f"def f{i}({before}how_v3_bf16_cvt{hint} = 1, b=1): return b  # how_v3_bf16_cvt = 1\n"
        for i, (before, hint) in enumerate(signatures)
    ).encode()
    edited = ROUNDING.apply(source)
    assert ROUNDING.inspect(edited)[0] is State.APPLIED
    assert ParameterDefault("how_v3_bf16_cvt", old=2, new=1).apply(edited) == source

"""INT4 packing: values and order against a spelled-out definition and against Quark's own packer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import pack_reorder
from support.quantizing import import_quark

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.packing import fold_scales, unpack_reorder


def random_words(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32)


def test_element_order_is_the_published_one() -> None:
    # Byte 0's low nibble is nibble 0; element k sits at b0l, b2l, b0h, b2h, b1l, b3l, b1h, b3h.
    word = sum(nibble << (4 * nibble) for nibble in range(8))  # nibble i holds the value i
    assert unpack_reorder(torch.tensor([word], dtype=torch.int32)).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@given(rows=st.integers(1, 12), words=st.integers(1, 20), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_agrees_with_quark_packer(rows: int, words: int, seed: int) -> None:
    import_quark()
    from quark.torch.utils.pack import Pack_4_bits

    theirs = Pack_4_bits(qscheme="per_channel", dtype="int4")
    packed = random_words((rows, words), seed)
    values = unpack_reorder(packed)
    assert torch.equal(values, theirs.unpack(packed, reorder=True))
    assert torch.equal(packed, theirs.pack(values.to(torch.int32), reorder=True))


def test_input_is_left_alone_and_may_be_strided() -> None:
    words = random_words((6, 10), seed=2)
    before = words.clone()
    assert torch.equal(unpack_reorder(words[:, ::2]), unpack_reorder(words[:, ::2].contiguous()))
    values = unpack_reorder(words)
    kept = values.clone()
    assert torch.equal(pack_reorder(values.t().contiguous().t()), words)
    assert torch.equal(words, before) and torch.equal(values, kept)


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(KimiError, match="int64"):
        unpack_reorder(torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fold_scales_of_one_projection(shape: tuple[int, ...]) -> None:
    rows = torch.tensor([0.5, 2.0, 4.0])
    assert fold_scales(torch.full(shape, 0.25), rows).tolist() == [0.125, 0.5, 1.0]


def test_fold_scales_of_stacked_experts() -> None:
    rows = torch.ones(2, 6)
    gate_up = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert fold_scales(gate_up, rows).tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]
    assert fold_scales(gate_up[:, 0], rows).tolist() == [[1] * 6, [3] * 6]


@pytest.mark.parametrize(("scale", "rows"), [((3,), (2, 6)), ((2,), (5,)), ((0,), (4,))])
def test_scales_that_do_not_fit_are_refused(scale: tuple[int, ...], rows: tuple[int, ...]) -> None:
    with pytest.raises(KimiError, match="does not fit"):
        fold_scales(torch.ones(scale), torch.ones(rows))

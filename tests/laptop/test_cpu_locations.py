"""KV bookkeeping operators against loops over requests and positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_laptop.cpu import locations

POOL, MAX_LEN = 7, 40


@st.composite
def batches(draw):
    """(request slots, start, end) of up to five requests with ranges of 0 to 9 positions."""
    slots = draw(st.lists(st.integers(0, POOL - 1), min_size=1, max_size=5, unique=True))
    starts = [draw(st.integers(0, MAX_LEN - 10)) for _ in slots]
    ends = [start + draw(st.integers(0, 9)) for start in starts]
    return torch.tensor(slots), torch.tensor(starts), torch.tensor(ends)


def table() -> torch.Tensor:
    return torch.arange(POOL * MAX_LEN, dtype=torch.int32).view(POOL, MAX_LEN)


@given(batches())
def test_extend_locations_are_read_request_after_request(batch):
    slots, starts, ends = batch
    total = int((ends - starts).sum())
    out = torch.full((total + 3,), -1, dtype=torch.int64)
    locations.assign_extend_cache_locs_cpu(slots, table(), starts, ends, out, MAX_LEN)
    expected = [int(table()[s, p]) for s, a, b in zip(slots, starts, ends, strict=True) for p in range(a, b)]
    assert out[:total].tolist() == expected
    assert out[total:].tolist() == [-1] * 3  # nothing written beyond the ranges


@given(batches())
def test_writing_to_the_pool_inverts_reading(batch):
    slots, starts, ends = batch
    total = int((ends - starts).sum())
    values = torch.arange(1000, 1000 + total)
    pool = table()
    locations.assign_req_to_token_pool_cpu(slots, pool, starts, ends, values, MAX_LEN)
    out = torch.empty(total, dtype=torch.int64)
    locations.assign_extend_cache_locs_cpu(slots, pool, starts, ends, out, MAX_LEN)
    assert torch.equal(out, values)
    assert int((pool != table()).sum()) == total  # only these entries changed


def test_draft_slots_follow_the_committed_tokens():
    out = torch.empty(2 * 3, dtype=torch.int64)
    locations.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([4, 1]), table(), torch.tensor([5, 9]), out, MAX_LEN, topk=1, num_steps=3
    )
    assert out.tolist() == [165, 166, 167, 49, 50, 51]


def test_bonus_token_is_the_last_committed_one():
    tokens = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23], dtype=torch.int32)
    bonus, lengths = torch.zeros(2, dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    locations.fill_bonus_tokens_cpu(tokens, lengths, bonus, accept_stride=4)
    assert bonus.tolist() == [13, 20]


def test_accepted_slots_are_packed():
    out = torch.full((8,), -1, dtype=torch.int64)
    accept = torch.tensor([[0, 1, -1, -1], [4, 5, 6, -1]])
    locations.fill_accept_out_cache_loc_cpu(accept, torch.arange(100, 108), out)
    assert out.tolist() == [100, 101, 104, 105, 106, -1, -1, -1]


def test_rows_move_in_every_layer_also_in_place():
    layers = [torch.arange(6 * 3, dtype=torch.float32).view(6, 3) + 100 * i for i in range(2)]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[torch.tensor([1, 2])] = layer[torch.tensor([2, 4])]
    locations.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([layer.stride(0) * 4 for layer in layers]),
        torch.tensor([1, 2]),
        torch.tensor([2, 4]),
    )
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))

"""Paged attention against a softmax per request, query and head."""

import pytest
import torch
from support.cpu_attention import decode, extend

from kimi_w4a8_laptop.cpu import attention

POOL_SLOTS, MAX_LEN = 512, 320


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, Dk] over keys [L, G, Dk], values [L, G, Dv] -> [H, Dv]."""
    heads, groups = q.shape[0], keys.shape[1]
    rows = []
    for h in range(heads):
        g = h // (heads // groups)
        weights = torch.softmax((keys[:, g].double() @ q[h].double()) * scale, dim=0)
        rows.append(weights @ values[:, g].double())
    return torch.stack(rows).float()


def paged(batch: int, lengths: list[int], groups: int, dim_k: int, dim_v: int, latent: bool, seed: int = 0):
    """A cache with shuffled slots, and req_to_token for requests in shuffled pool rows."""
    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(POOL_SLOTS, groups, dim_k, generator=gen)
    v = k[..., :dim_v] if latent else torch.randn(POOL_SLOTS, groups, dim_v, generator=gen)
    table = torch.zeros(batch + 2, MAX_LEN, dtype=torch.int32)
    free = torch.randperm(POOL_SLOTS, generator=gen).tolist()
    pool = torch.randperm(batch + 2, generator=gen)[:batch]
    for row, length in zip(pool, lengths, strict=True):
        table[row, :length] = torch.tensor([free.pop() for _ in range(length)], dtype=torch.int32)
    return k, v, table, pool


@pytest.mark.parametrize(("heads", "groups", "dim_k", "dim_v", "latent"), [(4, 2, 8, 8, False), (4, 1, 12, 8, True)])
def test_decode_stores_the_new_key_and_attends_to_all(heads, groups, dim_k, dim_v, latent):
    lengths = [9, 1, 170]
    k, v, table, pool = paged(3, lengths, groups, dim_k, dim_v, latent)
    loc = torch.tensor([int(table[row, length - 1]) for row, length in zip(pool, lengths, strict=True)])
    q, new_k = torch.randn(3, heads, dim_k), torch.randn(3, groups, dim_k)
    new_v = new_k[..., :dim_v] if latent else torch.randn(3, groups, dim_v)
    out = decode(q, k, v, table, pool, torch.tensor(lengths), (new_k, new_v, loc))
    assert torch.equal(k[loc], new_k)
    assert torch.equal(v[loc], new_v)
    for b, length in enumerate(lengths):
        slots = table[pool[b], :length].long()
        torch.testing.assert_close(out[b], naive(q[b], k[slots], v[slots], 0.3), rtol=1e-4, atol=1e-5)


def test_keys_and_values_of_one_allocation_are_both_stored():
    """SGLang's MHA pool is one tensor; comparing allocations instead of addresses once lost the draft's values."""
    k, v = torch.zeros(2, POOL_SLOTS, 2, 8).unbind(0)
    table, pool = torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([0])
    new_k, new_v = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    decode(torch.randn(1, 4, 8), k, v, table, pool, torch.tensor([2]), (new_k, new_v, torch.tensor([5])))
    assert torch.equal(k[5], new_k[0])
    assert torch.equal(v[5], new_v[0])


@pytest.mark.parametrize(
    "lengths,new", [([9, 11, 17], [3, 4, 4]), ([12, 6, 1], [3, 6, 1]), ([15, 2], [15, 0]), ([300, 140], [200, 5])]
)
@pytest.mark.parametrize("max_scores,queries", [(attention._MAX_SCORES, attention._QUERIES), (1, 3)])
def test_extend_is_causal_over_prefix_and_new_tokens(lengths, new, max_scores, queries, monkeypatch):
    monkeypatch.setattr(attention, "_MAX_SCORES", max_scores)  # 1: every request in a block of its own
    monkeypatch.setattr(attention, "_QUERIES", queries)
    k, v, table, pool = paged(len(lengths), lengths, 2, 8, 8, latent=False)
    total = sum(new)
    q, out = torch.randn(total, 4, 8), torch.full((total, 4, 8), float("nan"))
    k_ext = torch.randn(total, 2, 8)
    extend(q, k_ext, k_ext, k, v, table, pool, torch.tensor(lengths), torch.tensor(new), out)
    row = 0
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for i in range(count):
            slots = table[pool[b], : length - count + i + 1].long()
            torch.testing.assert_close(out[row], naive(q[row], k[slots], v[slots], 0.3), rtol=1e-4, atol=1e-5)
            row += 1


def test_a_broken_request_spoils_no_other():
    """Shorter requests are padded with their own keys, because a weight of zero does not hide a NaN."""
    k, v, table, pool = paged(2, [3, 17], 2, 8, 8, latent=False)
    k[table[pool[1], :17].long()] = v[table[pool[1], :17].long()] = float("nan")
    k[0] = v[0] = float("nan")  # what the unused ends of the table point to
    assert 0 not in table[pool[0], :3]
    q, out = torch.randn(2, 4, 8), torch.empty(2, 4, 8)
    lengths = torch.tensor([3, 17])
    extend(q, None, None, k, v, table, pool, lengths, torch.tensor([1, 1]), out)
    assert bool(out[0].isfinite().all()) and bool(out[1].isnan().all())


def test_an_fp8_cache_is_rounded_when_it_is_written_and_read_as_it_is():
    lengths = torch.tensor([9, 1, 17])
    wide, _, table, pool = paged(3, lengths.tolist(), 1, 12, 8, latent=True)
    loc = torch.tensor([int(table[row, length - 1]) for row, length in zip(pool, lengths, strict=True)])
    q, key = torch.randn(3, 4, 12), torch.randn(3, 1, 12)

    def decoded(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return decode(q, cache, cache[..., :8], table, pool, lengths, (new, new[..., :8], loc))

    rounded = wide.to(torch.float8_e4m3fnuz)
    expected = decoded(rounded.float(), key.to(rounded.dtype).float())
    assert torch.equal(decoded(rounded, key), expected)
    assert torch.equal(rounded[loc].float(), key.to(rounded.dtype).float())
    assert not torch.equal(decoded(wide, key), expected)

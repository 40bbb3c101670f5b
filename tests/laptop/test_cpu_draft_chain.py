"""The draft chain and its greedy verification against a walk along each chain."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_w4a8_laptop.cpu import draft_chain

N = 4


def chain(seq_lens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arrays SGLang allocates for a batch, filled by our operator."""
    batch = len(seq_lens)
    links = torch.full((3, batch, N), 99)
    mask = torch.ones(batch * N * N, dtype=torch.bool)
    positions = torch.full((batch * N,), 99)
    draft_chain.build_tree_kernel_efficient_cpu(
        *torch.zeros(2, batch, N - 1, dtype=torch.int64), seq_lens, mask, positions, *links, 1, N - 1, N, 1
    )
    return {"index": links[0], "next": links[1], "sibling": links[2], "mask": mask, "positions": positions}


def test_chain_positions_links_and_mask():
    made = chain(torch.tensor([7, 30]))
    assert made["positions"].tolist() == [7, 8, 9, 10, 30, 31, 32, 33]
    assert made["index"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made["next"].tolist() == [[1, 2, 3, -1]] * 2
    assert made["sibling"].tolist() == [[-1] * N] * 2
    assert torch.equal(made["mask"].view(2, N, N)[1], torch.tril(torch.ones(N, N, dtype=torch.bool)))


@given(st.lists(st.tuples(*[st.integers(0, 2)] * (2 * N)), min_size=1, max_size=6))
def test_greedy_verification_accepts_the_agreeing_prefix(rows):
    batch = len(rows)
    candidates = torch.tensor([row[:N] for row in rows])
    target = torch.tensor([row[N:] for row in rows])
    made = chain(torch.full((batch,), 5))
    predicts = torch.full((batch * N,), -7, dtype=torch.int32)
    accept_index = torch.full((batch, N), -1, dtype=torch.int32)
    accept_num = torch.empty(batch, dtype=torch.int32)
    draft_chain.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_num,
        candidates=candidates,
        retrive_index=made["index"],
        retrive_next_token=made["next"],
        retrive_next_sibling=made["sibling"],
        target_predict=target,
    )
    for b in range(batch):
        accepted = 0
        while accepted < N - 1 and candidates[b, accepted + 1] == target[b, accepted]:
            accepted += 1
        assert int(accept_num[b]) == accepted
        assert accept_index[b].tolist() == [b * N + i if i <= accepted else -1 for i in range(N)]
        committed = predicts[b * N : b * N + N].tolist()
        assert committed == target[b, : accepted + 1].tolist() + [-7] * (N - 1 - accepted)


def test_draft_trees_are_refused():
    with pytest.raises(NotImplementedError, match="topk 1"):
        inspect.unwrap(draft_chain.build_tree_kernel_efficient_cpu)(*[torch.empty(1)] * 8, 2, 3, 4, 0)

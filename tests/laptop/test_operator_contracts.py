"""Calls that differ from an operator's contract in one argument are refused by name."""

from __future__ import annotations

import pytest
import torch
from laptop.contract_check import ContractError, require, takes
from laptop.contracts import Contract, Tensor, Value

from kimi_w4a8_laptop.cpu import draft_chain

B, N = 2, 4


def verification() -> dict[str, torch.Tensor]:
    """Arguments of verify_tree_greedy as SGLang and the plugin make them."""
    chain = torch.arange(B * N).view(B, N)
    return {
        "predicts": torch.zeros(B * N, dtype=torch.int32),
        "accept_index": torch.full((B, N), -1, dtype=torch.int32),
        "accept_token_num": torch.empty(B, dtype=torch.int32),
        "candidates": torch.zeros(B, N, dtype=torch.int64),
        "retrive_index": chain,
        "retrive_next_token": torch.tensor([[1, 2, 3, -1]] * B),
        "retrive_next_sibling": torch.full((B, N), -1),
        "target_predict": torch.zeros(B, N, dtype=torch.int64),
    }


@pytest.mark.parametrize("argument", list(verification()))
def test_each_argument_of_the_verification_is_checked(argument: str) -> None:
    right = verification()
    draft_chain.verify_tree_greedy_cpu(**right)
    draft_chain.verify_tree_greedy_cpu(*right.values())
    value = right[argument]
    other = torch.int64 if value.dtype == torch.int32 else torch.int32
    wide = torch.zeros(*value.shape, 2, dtype=value.dtype)[..., 0]
    for wrong in (value.to(other), wide, value.unsqueeze(0), None):
        with pytest.raises(ContractError, match=rf"verify_tree_greedy: {argument} is .*eagle_utils\.cu"):
            draft_chain.verify_tree_greedy_cpu(**{**right, argument: wrong})
    with pytest.raises(ContractError, match=f"{argument} is missing"):
        draft_chain.verify_tree_greedy_cpu(**{name: value for name, value in right.items() if name != argument})


def test_sizes_devices_and_unknown_arguments_are_checked() -> None:
    right = verification()
    with pytest.raises(ContractError, match=r"target_predict is shape \[2, 3\], expected \[batch drafts\]"):
        draft_chain.verify_tree_greedy_cpu(**{**right, "target_predict": torch.zeros(B, 3, dtype=torch.int64)})
    with pytest.raises(ContractError, match="candidates is meta, expected cpu"):
        draft_chain.verify_tree_greedy_cpu(**{**right, "candidates": right["candidates"].to("meta")})
    with pytest.raises(ContractError, match="topk is given, expected no such argument"):
        draft_chain.verify_tree_greedy_cpu(**right, topk=1)


def test_the_rules_of_a_contract() -> None:
    contract = Contract(
        {"x": Tensor((torch.int32, torch.int64), "a b"), "flat": Tensor(torch.int32, "a*b 3 _", contiguous=False),
         "scale": Value(float), "bias": Tensor(torch.float32, optional=True)}, "a source"
    )  # fmt: skip
    right = {"x": torch.zeros(2, 3, dtype=torch.int64), "flat": torch.zeros(6, 3, 1, dtype=torch.int32), "scale": 1.0}
    require("op", contract, right, device="cpu")
    require("op", contract, {**right, "bias": None})
    for name, wrong, message in (
        ("flat", torch.zeros(5, 3, 1, dtype=torch.int32), r"shape \[5, 3, 1\]"),
        ("flat", torch.zeros(6, 2, 1, dtype=torch.int32), r"shape \[6, 2, 1\]"),
        ("scale", torch.zeros(1), "is Tensor, expected <class 'float'>"),
        ("x", [[1]], "is list, expected a tensor"),
    ):
        with pytest.raises(ContractError, match=f"op: {name}.*{message}"):
            require("op", contract, {**right, name: wrong})
    with pytest.raises(ContractError, match="x is cpu, expected cuda"):
        require("op", contract, right, device="cuda")


def test_a_stand_in_has_the_arguments_of_its_operator() -> None:
    with pytest.raises(TypeError, match="takes"):
        takes("verify_tree_greedy")(lambda predicts: None)

"""Calls that differ from an operator's contract in one argument are refused by name, for every operator."""

from __future__ import annotations

from itertools import count
from math import prod
from typing import Any

import pytest
import torch

from kimi_w4a8_laptop.contract_check import CONTRACTS, ContractError, require, takes
from kimi_w4a8_laptop.contracts import Contract, Tensor, Value
from kimi_w4a8_laptop.cpu import attention, draft_chain, locations

TENSORS = [
    (name, key) for name, c in CONTRACTS.items() for key, rule in c.arguments.items() if isinstance(rule, Tensor)
]
# What an AITER tensor would not need is not planted.
OF_KIND = {int: 1, float: 1.0, bool: True, str: "auto", tuple: (-1, -1), list: [], torch.dtype: torch.bfloat16}


def right(contract: Contract) -> dict[str, Any]:
    """Arguments that fit, with a size of its own for each name of a dimension."""
    sizes: dict[str, int] = {}
    fresh = count(2)
    values: dict[str, Any] = {}
    for name, rule in contract.arguments.items():
        if isinstance(rule, Value):
            kind = rule.kinds[0] if isinstance(rule.kinds, tuple) else rule.kinds
            values[name] = OF_KIND[kind]
        else:
            shape = [
                prod(int(part) if part.isdigit() else sizes.setdefault(part, next(fresh)) for part in names.split("*"))
                for names in (rule.shape or "_ _").replace("_ ", "_free ").split()
            ]
            values[name] = torch.empty(shape, dtype=_dtype(contract, rule))
    return values


def _dtype(contract: Contract, rule: Tensor) -> torch.dtype:
    if isinstance(rule.dtypes, str):
        other = contract.arguments[rule.dtypes]
        assert isinstance(other, Tensor)
        return _dtype(contract, other)
    return rule.dtypes[0] if isinstance(rule.dtypes, tuple) else rule.dtypes


@pytest.mark.parametrize("name", CONTRACTS)
def test_what_fits_a_contract_is_accepted_with_and_without_optional_arguments(name: str) -> None:
    contract = CONTRACTS[name]._replace(sizes=())  # test_virtual_device.py plants what the rules about sizes refuse
    whole = right(contract)
    require(name, contract, whole, device="cpu")
    needed = {key: value for key, value in whole.items() if not contract.arguments[key].optional}
    require(name, contract, needed)
    if any(isinstance(rule, Tensor) for rule in contract.arguments.values()):
        with pytest.raises(ContractError, match="is cpu, expected cuda"):
            require(name, contract, whole, device="cuda")
    with pytest.raises(ContractError, match="other is given, expected no such argument"):
        require(name, contract, {**whole, "other": 1})


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_each_planted_mismatch_of_each_tensor_is_refused(name: str, argument: str) -> None:
    contract = CONTRACTS[name]
    whole, rule = right(contract), contract.arguments[argument]
    assert isinstance(rule, Tensor)
    value = whole[argument]
    wrong: dict[str, Any] = {"dtype": value.to(torch.complex64), "kind": 1.5}
    if not rule.optional:
        wrong["missing"] = None
    if rule.shape is not None:
        wrong["rank"] = value.unsqueeze(0)
    if rule.layout != "any":  # every second element of a row: neither contiguous nor contiguous in its last dimension
        wrong["layout"] = torch.empty(*value.shape, 2, dtype=value.dtype)[..., 0]
        if value.shape[-1] == 1:
            del wrong["layout"]
    for planted in wrong.values():
        with pytest.raises(ContractError) as error:
            require(name, contract, {**whole, argument: planted})
        assert contract.source in str(error.value)
        assert argument in str(error.value) or "expected" in str(error.value)
    # The device of the first tensor is the one that counts.
    with pytest.raises(ContractError, match="meta"):
        require(name, contract, {**whole, argument: value.to("meta")}, device="cpu")


def test_each_stand_in_checks_its_contract() -> None:
    stand_ins = [getattr(module, name) for module in (locations, draft_chain) for name in module.OPERATORS]
    stand_ins += [attention.decode_attention_cpu, attention.extend_attention_cpu]
    for stand_in in stand_ins:
        with pytest.raises(ContractError, match=r"is missing, .*csrc"):
            stand_in()


def test_the_rules_of_a_contract() -> None:
    contract = Contract(
        {
            "x": Tensor((torch.int32, torch.int64), "a b"),
            "y": Tensor("x", "2*a"),
            "flat": Tensor(torch.int32, "a*b 3 _"),
            "scale": Value(float),
        },
        "a source",
    )
    x, y = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    fits = {"x": x, "y": y, "flat": torch.zeros(6, 3, 1, dtype=torch.int32), "scale": 1.0}
    require("op", contract, fits)
    for name, wrong, message in (
        ("y", y.int(), r"torch.int32, expected torch.int64 \(a source\)"),
        ("y", y[:3], r"shape \[3\], expected \[2\*a\] with {'a': 2, 'b': 3}"),
        ("flat", torch.zeros(5, 3, 1, dtype=torch.int32), r"shape \[5, 3, 1\]"),
        ("flat", torch.zeros(6, 2, 1, dtype=torch.int32), r"shape \[6, 2, 1\]"),
        ("scale", torch.zeros(1), "Tensor, expected <class 'float'>"),
        ("x", [[1]], "list, expected a tensor"),
        ("x", torch.zeros(3, 2, dtype=torch.int64).T, r"strides \(1, 2\), expected layout contiguous"),
    ):
        with pytest.raises(ContractError, match=f"op: {name} is {message}"):
            require("op", contract, {**fits, name: wrong})


def test_a_stand_in_has_the_arguments_of_its_operator() -> None:
    with pytest.raises(TypeError, match="takes"):
        takes("sgl_kernel.verify_tree_greedy")(lambda predicts: None)

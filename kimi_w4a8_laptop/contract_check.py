"""Check calls of operators, and of their stand-ins, against the contracts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import TypeVar

import torch

from .aiter_contracts import AITER
from .contracts import SGL_KERNEL, Contract, Rule, Value

CONTRACTS = SGL_KERNEL | AITER

_Operator = TypeVar("_Operator", bound=Callable[..., object])


class ContractError(RuntimeError):
    """A call that the compiled operator refuses or would misread; torch's own operators raise RuntimeError."""


def require(name: str, contract: Contract, values: Mapping[str, object], device: str | None = None) -> None:
    """Raise ContractError unless `values` fit the contract of operator `name`; all tensors share a device.

    device: the type of device that the tensors are on, or None for any.
    """
    sizes: dict[str, int] = {}
    found: torch.device | None = None
    for argument, rule in contract.arguments.items():
        value = values.get(argument)
        if value is None:
            if not rule.optional:
                raise _refused(name, contract, argument, "missing", "a value")
        elif isinstance(rule, Value):
            # Python's True is an integer, and no size or number.
            if not isinstance(value, rule.kinds) or (isinstance(value, bool) and rule.kinds is not bool):
                raise _refused(name, contract, argument, type(value).__name__, str(rule.kinds))
        elif not isinstance(value, torch.Tensor):
            raise _refused(name, contract, argument, type(value).__name__, "a tensor")
        else:
            dtypes = getattr(values.get(rule.dtypes), "dtype", None) if isinstance(rule.dtypes, str) else rule.dtypes
            if value.dtype is not dtypes and (type(dtypes) is not tuple or value.dtype not in dtypes):
                raise _refused(name, contract, argument, str(value.dtype), str(dtypes))
            if not _laid_out(value, rule.layout):
                raise _refused(name, contract, argument, f"strides {value.stride()}", f"layout {rule.layout}")
            if rule.shape is not None and not _fits(rule.shape, value.shape, sizes):
                expected = f"[{rule.shape}] with {sizes}"
                raise _refused(name, contract, argument, f"shape {list(value.shape)}", expected)
            found = found or value.device
            if value.device != found or (device is not None and found.type != device):
                raise _refused(name, contract, argument, str(value.device), device or str(found))
    if unknown := values.keys() - contract.arguments.keys():
        raise _refused(name, contract, ", ".join(sorted(unknown)), "given", "no such argument")
    require_rules(name, contract, contract.sizes, values)


def require_rules(name: str, contract: Contract, rules: tuple[Rule, ...], values: Mapping[str, object]) -> None:
    """Raise ContractError where a rule does not hold; one about an optional argument that is not given does."""
    for rule in rules:
        if values.get(rule.argument) is not None and not rule.holds(values):
            raise _refused(name, contract, rule.argument, _described(values[rule.argument]), rule.expected)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f" with strides {value.stride()}"
    numbers = f" {value.tolist()[:40]}" if value.dtype in (torch.int32, torch.int64) and value.is_cpu else ""
    return f"{value.dtype} {list(value.shape)}{strides}{numbers}"


def _laid_out(value: torch.Tensor, layout: str) -> bool:
    if layout == "rows":
        return value.dim() == 0 or value.stride(-1) == 1 or value.shape[-1] == 1
    return layout == "any" or value.is_contiguous()


def _fits(shape: str, found: tuple[int, ...], sizes: dict[str, int]) -> bool:
    dimensions = _dimensions(shape)
    if len(dimensions) != len(found):
        return False
    for names, size in zip(dimensions, found, strict=True):
        if len(names) == 1:
            name = names[0]
            if name != "_" and sizes.setdefault(name, int(name) if name.isdigit() else size) != size:
                return False
        elif prod(int(name) if name.isdigit() else sizes[name] for name in names) != size:
            return False
    return True


@functools.cache
def _dimensions(shape: str) -> list[list[str]]:
    return [dimension.split("*") for dimension in shape.split()]


def _refused(name: str, contract: Contract, argument: str, found: str, expected: str) -> ContractError:
    return ContractError(f"{name}: {argument} is {found}, expected {expected} ({contract.source})")


def takes(name: str) -> Callable[[_Operator], _Operator]:
    """Decorate a stand-in so that each call is checked against the table's contract of operator `name`."""
    contract = CONTRACTS[name]
    names = list(contract.arguments)

    def checked(stand_in: _Operator) -> _Operator:
        if (own := list(inspect.signature(stand_in).parameters)) != names:
            raise TypeError(f"{stand_in.__name__} takes {own}, and the operator {names}")

        @functools.wraps(stand_in)
        def call(*given: object, **named: object) -> object:
            require(name, contract, {**dict(zip(names, given, strict=False)), **named})
            return stand_in(*given, **named)

        return call  # type: ignore[return-value]

    return checked

"""Stand-ins for the compiled operators that SGLang calls on HIP, in torch; each refuses what its contract refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

from ..contract_check import CONTRACTS, require
from .kernel_launch import host, launch

STAND_INS: dict[str, Callable[..., object]] = {}
# They only divide the work: no result depends on them.
_SIZES = ("max_seqlen", "min_seqlen", "workspace", "max_num_partitions", "partition_size")
_PLAN = (*_SIZES, "num_kv_splits", "num_split", "work_", "reduce_")
_NEUTRAL = (None, 0, 1, -1, (-1, -1), (-1, -1, 0), "auto", "NHD")
_Function = TypeVar("_Function", bound=Callable[..., object])


def operator(name: str) -> Callable[[_Function], _Function]:
    """Register a stand-in of operator `name`: its contract is checked, then it runs as one launch.

    The stand-in takes the arguments that it computes with. Others must have a value that changes nothing.
    """
    contract = CONTRACTS[name]
    names = list(contract.arguments)

    def register(stand_in: _Function) -> _Function:
        read = [*inspect.signature(stand_in).parameters]
        if unknown := set(read) - set(names):
            raise TypeError(f"{stand_in.__name__} takes {unknown}, and {name} does not")

        @functools.wraps(stand_in)
        def call(*given: object, **named: object) -> object:
            if len(given) > len(names):
                raise TypeError(f"{name} takes {len(names)} arguments, not {len(given)}")
            values = {**dict(zip(names, given, strict=False)), **named}
            require(name, contract, values, "cuda")
            for key, value in values.items():
                if key not in read and not key.startswith(_PLAN) and not _neutral(value):
                    raise NotImplementedError(f"{name}: the stand-in does not compute with {key}={value}")
            return launch(name, stand_in, **{key: value for key, value in values.items() if key in read})

        STAND_INS[name] = call
        return stand_in

    return register


def _neutral(value: object) -> bool:
    """Return True for a value that changes no result; scales and the lengths of last pages are ones."""
    if isinstance(value, torch.Tensor):
        on_host = host(value)
        return isinstance(on_host, torch.Tensor) and bool((on_host == 1).all())
    return value in _NEUTRAL

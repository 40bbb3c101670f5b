"""Stand-ins for the compiled operators that SGLang calls on HIP, in torch; each refuses what its contract refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from ..contract_check import CONTRACTS, require
from .kernel_launch import launch

STAND_INS: dict[str, Callable[..., object]] = {}
_Function = TypeVar("_Function", bound=Callable[..., object])


def operator(name: str) -> Callable[[_Function], _Function]:
    """Register a stand-in of operator `name`: its contract is checked, then it runs as one launch.

    The stand-in takes the arguments that it reads. All others are in the contract.
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
            return launch(name, stand_in, **{key: value for key, value in values.items() if key in read})

        STAND_INS[name] = call
        return stand_in

    return register

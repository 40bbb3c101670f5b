"""`sgl_kernel` and `aiter` as packages in which a name without a stand-in fails when it is called, and is listed."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence

import torch

PACKAGES = ("sgl_kernel", "aiter")
# Absent from the HIP build, so that SGLang takes the other branch.
_JIT = "sglang.kernels.jit.utils.compile.loader"
_ABSENT = ("sgl_kernel.scalar_type",)
# They only choose a function, which fails when it is called.
_CALLED_AT_IMPORT = ("aiter.get_hip_quant", "aiter.ops.triton.utils._triton.kernel_repr.make_kernel_repr")
# As in AITER on gfx942.
_CONSTANTS = {
    "aiter.ops.enum.QuantType": enum.IntEnum("QuantType", "No per_Tensor per_Token", start=0),
    "aiter.ops.triton.utils.types.e4m3_dtype": torch.float8_e4m3fnuz,
    "aiter.dtypes.fp8": torch.float8_e4m3fnuz,
}
bound: set[str] = set()  # names that SGLang imported and that have no stand-in


class Package(types.ModuleType):
    """A module whose attributes are stand-ins, submodules, or functions that raise."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        from . import aiter_attention, all_reduce, dense, rope  # noqa: F401  (start-up: they import torch and register themselves)
        from .operators import STAND_INS  # start-up: as above

        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if full in _CONSTANTS:
            return _CONSTANTS[full]
        package = full.split(".")[0]
        for known, stand_in in STAND_INS.items():
            path = known.split(".")
            if path[0] == package and path[-1] == name:
                return stand_in
            if known.startswith(f"{full}."):
                return types.SimpleNamespace(**{path[-1]: stand_in})  # an object with this method
        return Missing(full)


class Missing:
    """A name that SGLang imported and that has no stand-in: calling it fails."""

    def __init__(self, full: str) -> None:
        bound.add(full)
        self.__name__ = self.__qualname__ = full
        self.__doc__ = None

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return _CONSTANTS[full] if full in _CONSTANTS else Missing(full)

    def __call__(self, *_: object, **__: object) -> object:
        if self.__name__ in _CALLED_AT_IMPORT:
            return Missing(f"{self.__name__}()")
        raise NotImplementedError(f"{self.__name__} has no stand-in on the virtual node (kimi_w4a8_laptop/virtual)")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(_ABSENT):
            raise ModuleNotFoundError(name, name=name)
        if name == _JIT:
            return _with_our_jit(importlib.machinery.PathFinder.find_spec(name, path))
        ours = name.split(".")[0] in PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__path__"] = []
        module.__dict__["__version__"] = os.environ.get("KIMI_VIRTUAL_AITER", "0.1.14")


def _with_our_jit(spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
    """Let SGLang's loader of HIP sources return stand-ins: there is no hipcc here."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            module.__dict__["load_jit"] = lambda *_, **__: Package("sglang_jit")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def install() -> None:
    sys.meta_path.insert(0, _Finder())

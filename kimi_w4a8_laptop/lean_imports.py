"""Skip SGLang imports that fork servers and load generators never use, which saves a third of the import time.

Code that needs one of them later imports the real module on first use.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Optional imports of other packages. transformers uses the first two for losses and for one kind of assisted generation
# (with pandas and pyarrow, which starts a thread). The others are for Mistral's formats and for guessing encodings.
_UNUSED = ("sklearn", "scipy", "mistral_common", "chardet")
_COMPILER = "torch._dynamo"
_MODELS = "sglang.srt.models"
_OURS = frozenset(("kimi_k25", "kimi_k25_eagle3", "deepseek_v2", "llama_eagle3"))
_OTHERS = "SGLANG_DISABLED_MODEL_ARCHS"
# torch's tensor parallelism, with sympy. None of our models uses it.
_LATER = "sglang.srt.layers.model_parallel"
# A data set of pictures that imports `datasets`, with pandas and pyarrow. No workload reads it (`Workload.dataset`). It
# stays out for good, because a load generator imports the other data sets after its fork.
_PICTURES = "sglang.benchmark.datasets.mmmu"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Skip, inside the block, all imports that the built-in model's engines and load generators do not need."""
    distributions, others = importlib.metadata.packages_distributions, os.environ.get(_OTHERS)
    importlib.metadata.packages_distributions = _OwnNames
    sys.modules.update(dict.fromkeys(_UNUSED))  # type: ignore[arg-type]  # None means "not installed" to Python
    sys.modules[_LATER] = _StandIn(_LATER)
    sys.modules[_PICTURES] = ModuleType(_PICTURES)
    sys.modules[_PICTURES].MMMUDataset = None  # type: ignore[attr-defined]
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        _leave_compiler_out()
    found = importlib.util.find_spec(_MODELS)
    assert found is not None and found.submodule_search_locations is not None
    names = {module.name for module in pkgutil.iter_modules(found.submodule_search_locations)}
    os.environ[_OTHERS] = ",".join([*(names - _OURS), others or ""])
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = distributions
        for name in _UNUSED:
            del sys.modules[name]
        _end_standing_in()
        del os.environ[_OTHERS]
        if others is not None:
            os.environ[_OTHERS] = others
    registry: Any = sys.modules.get(f"{_MODELS}.registry")
    if registry is not None:
        registry.ModelRegistry.models = _Models(registry.ModelRegistry.models)


class _OwnNames(dict[str, list[str]]):
    """Answer `packages_distributions` with the package's own name instead of reading every installed wheel."""

    def __missing__(self, package: str) -> list[str]:
        return [package]


class _Models(dict[str, Any]):
    """SGLang's model classes by architecture; imports the other makers' models at the first unknown architecture."""

    complete = False

    def __contains__(self, architecture: object) -> bool:
        if not self.complete and not super().__contains__(architecture):
            self.complete = True
            registry: Any = sys.modules[f"{_MODELS}.registry"]
            self.update({**registry.import_model_classes(_MODELS), **self})
        return super().__contains__(architecture)

    def keys(self) -> Any:
        """Return self, because SGLang 0.5.20 also searches the keys."""
        return self


class _StandIn(ModuleType):
    """Placeholder for a module that others use in functions only; imports the real module on first attribute access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _real(self.__name__, name)


def _leave_compiler_out() -> None:
    """Make `torch.compile` do nothing, as under TORCHDYNAMO_DISABLE=1, without importing its 1,000 modules."""
    torch.compile = torch._disable_dynamo = _undecorated  # type: ignore[assignment]
    package = _StandIn(_COMPILER)
    package.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(package, name, _undecorated)
    sys.modules[_COMPILER] = package
    for leaf, name in (
        ("utils", "is_compile_supported"),
        ("_trace_wrapped_higher_order_op", "TransformGetItemToIndex"),
    ):
        module = sys.modules[f"{_COMPILER}.{leaf}"] = _StandIn(f"{_COMPILER}.{leaf}")
        setattr(module, name, partial(_call, module.__name__, name))


def _undecorated(fn: Any = None, *_: Any, model: Any = None, **__: Any) -> Any:
    given = model if fn is None else fn
    return _undecorated if given is None else given


def _end_standing_in() -> None:
    for name in [name for name, module in list(sys.modules.items()) if isinstance(module, _StandIn)]:
        del sys.modules[name]


def _call(module: str, name: str, *arguments: Any) -> Any:
    return _real(module, name)(*arguments)


def _real(module: str, name: str) -> Any:
    _end_standing_in()
    return getattr(importlib.import_module(module), name)  # heavy: it stood in for this module

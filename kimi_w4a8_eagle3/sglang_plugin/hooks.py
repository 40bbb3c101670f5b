"""Hooks on SGLang, by feature: which functions and private names a feature needs, and what happens without them.

SGLang only logs a hook that it cannot apply, and would serve without the page guard or the door. Here a release that
lacks a name of a required feature, or has changed it, is not served. An optional feature is left out as a whole, and
the metric kimi_missing_feature_info names it. `known_signatures.json` has the interfaces of the tested releases
(`python -m proof.hook_signatures`). With KIMI_UNTRIED_SGLANG=1 a function may have another source, and the same
metric names it.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from ..base.errors import KimiError, or_end
from ..gates import read_gates

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.plugins.hook_registry import HookRegistry

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])
HookKind = Literal["before", "after", "around", "replace"]  # the values of SGLang's HookType

missing_features: list[str] = []  # optional features and tested sources that this process serves without
_KINDS = ("property", "classmethod", "staticmethod")
_targets: set[str] = set()  # of all hooks that this process registered


class Hook(NamedTuple):
    """A function of ours at a dotted name of SGLang's."""

    target: str
    kind: HookKind
    function: Callable[..., object]


@dataclass
class Feature:
    """Hooks of one feature, which are applied together.

    needs: further private names of SGLang's that the hooks use or override.
    remove_when: the change in SGLang that makes the hooks unnecessary.
    environ: SGLang's variables that the hooks rely on, set where the operator has not set them.
    optional: serve without this feature where a name is missing; otherwise the process ends.
    """

    name: str
    remove_when: str
    needs: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    hooks: list[Hook] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of SGLang's that the feature cannot do without."""
        return sorted({*self.needs, *(hook.target for hook in self.hooks)})

    def before(self, *targets: str) -> Callable[[Function], Function]:
        """Call the decorated function with the target's arguments before the target; it may return other arguments."""
        return self._hook("before", targets)

    def after(self, *targets: str) -> Callable[[Function], Function]:
        """Call the decorated function with the result and the target's arguments; it may return another result."""
        return self._hook("after", targets)

    def around(self, *targets: str) -> Callable[[Function], Function]:
        """Call the decorated function in place of the target, with the target and its arguments."""
        return self._hook("around", targets)

    def _hook(self, kind: HookKind, targets: tuple[str, ...]) -> Callable[[Function], Function]:
        def declare(function: Function) -> Function:
            self.hooks += [Hook(target, kind, function) for target in targets]
            return function

        return declare


@cache
def counter(name: str, text: str, *labels: str) -> Counter:
    """Return the counter of this name, made at its first use."""
    from prometheus_client import Counter  # it reads its environment when imported, and SGLang sets that late

    return Counter(name, text, labels)


def register(registry: type[HookRegistry], features: Iterable[Feature]) -> None:
    """Register all hooks of the features, and end the process when SGLang cannot apply one of them."""
    from sglang.srt.plugins.hook_registry import HookType  # SGLang's import order: its registry loads us

    if not _targets:
        _check_after_apply(registry)
    for feature in features:
        unknown = [why for name in feature.names if (why := _unknown(name))]
        if unknown and not feature.optional:
            raise _unknown_release(feature.name, unknown)
        if unknown:
            missing_features.append(feature.name)
            logger.warning("serving without %s: this release lacks or changed %s", feature.name, ", ".join(unknown))
            continue
        for name, value in feature.environ.items():
            os.environ.setdefault(name, value)
        for hook in feature.hooks:
            registry.register(hook.target, hook.function, HookType(hook.kind))
            _targets.add(hook.target)


def _check_after_apply(registry: type[HookRegistry]) -> None:
    """Make SGLang's `apply_hooks` end the process if it leaves one of `_targets` unhooked."""
    apply_hooks = registry.apply_hooks

    @wraps(apply_hooks)
    def apply_and_check() -> None:
        apply_hooks()
        with or_end("the plugin's hooks cannot be checked"):
            if unapplied := sorted(_targets - registry._patched):
                raise _unknown_release("these hooks", unapplied)

    registry.apply_hooks = apply_and_check


class Interface(NamedTuple):
    """Call and source of a function of SGLang's, on which hooks rely.

    call: `async (obj, *, stream=False) -> 3 values`; for a class only `class`.
    source: a hash of its lines, without comments; empty for other libraries, which an image may have in any release.
    """

    call: str
    source: str


@cache
def known_interfaces() -> Mapping[str, Mapping[str, Interface]]:
    """Return the interfaces of each hooked or used name, by the releases that the package is tested with."""
    known = json.loads(Path(__file__).with_name("known_signatures.json").read_text())
    return {name: {release: Interface(*one) for release, one in of.items()} for name, of in known.items()}


def interface_of(name: str) -> Interface | None:
    """Return the interface of a dotted name; None if the release lacks it."""
    return None if (source := _source(name)) is None else _interface(name, source)


def _interface(name: str, source: str) -> Interface:
    (top,) = ast.parse(f"if True:\n{source}" if source[:1] == " " else source).body
    function = top.body[0] if isinstance(top, ast.If) else top
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return Interface("class", _digest(name, source))
    kinds = [kind for kind in map(ast.unparse, function.decorator_list) if kind in _KINDS]
    words = [*kinds, *["async"] * isinstance(function, ast.AsyncFunctionDef), f"({_parameters(function.args)})"]
    return Interface(f"{' '.join(words)} -> {_returns(function)}", _digest(name, source))


def _source(name: str) -> str | None:
    """Return the source of a function or class, below its hooks; None if the release lacks it."""
    try:
        found = pkgutil.resolve_name(name)
        return inspect.getsource(inspect.unwrap(getattr(found, "fget", found)))  # of a property
    except (ImportError, AttributeError, OSError, TypeError):
        return None


def _digest(name: str, source: str) -> str:
    lines = [line.rstrip() for line in source.splitlines() if not line.lstrip().startswith("#")]
    own = name.startswith("sglang.")
    return blake2b("\n".join(filter(None, lines)).encode(), digest_size=4).hexdigest() if own else ""


def _parameters(given: ast.arguments) -> str:
    """Return the parameters with their defaults, without annotations."""
    for node in ast.walk(given):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(given)


def _returns(function: ast.AST) -> str:
    """Return what a function gives back: `3 values`, `a value or nothing`, `yields`."""
    found = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            found.add("yields")
        elif isinstance(node, ast.Return):
            value = node.value
            nothing = value is None or (isinstance(value, ast.Constant) and value.value is None)
            found.add(
                "nothing" if nothing else f"{len(value.elts)} values" if isinstance(value, ast.Tuple) else "a value"
            )
    return " or ".join(sorted(found)) or "nothing"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _unknown(name: str) -> str | None:
    """Return the name and what is unknown about it; None if all is well."""
    known = known_interfaces().get(name, {}).values()
    if (source := _source(name)) is None:
        return name
    digest = _digest(name, source)
    if not known or (digest and digest in {one.source for one in known}):
        return None  # the same source is called in the same way
    found = _interface(name, source)
    if found in known:
        return None
    calls = sorted({one.call for one in known})
    if found.call not in calls:
        return f"{name}{'' if found.call[:1] == '(' else ' '}{found.call} (known: {' or '.join(calls)})"
    if not read_gates(os.environ).untried_sglang:
        return f"{name} (its source is unknown)"
    if (untried := f"a tested source of {name}") not in missing_features:
        missing_features.append(untried)
        logger.warning("serving without %s (KIMI_UNTRIED_SGLANG=1)", untried)
    return None


def _unknown_release(feature: str, names: list[str]) -> KimiError:
    return KimiError(
        f"this SGLang release lacks or changed functions that the plugin uses for {feature}: {', '.join(names)}",
        where="kimi_w4a8_eagle3.sglang_plugin",
        expected="a release that this package is tested with",
        remedy="install one that `kimi-w4a8 doctor` names; KIMI_UNTRIED_SGLANG=1 serves where only sources are unknown",
    )

"""Hooks on SGLang, by feature: which functions and private names a feature needs, and what happens without them.

SGLang only logs a hook that it cannot apply, and would serve without the page guard. Here a release that lacks a
name of a required feature, or calls it in another way, is not served. An optional feature is left out as a whole, and
the metric kimi_missing_feature_info names it. `known_signatures.json` has the calls of the tested releases
(`python -m proof.hook_signatures`).
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from ..base.errors import KimiError, or_end

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.plugins.hook_registry import HookRegistry

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])
HookKind = Literal["before", "after", "around", "replace"]  # the values of SGLang's HookType

missing_features: list[str] = []  # optional features that this process serves without
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

    def leave_out(self, reason: str, say: bool = True) -> None:
        """Let the metric name this optional feature as missing, and log why. say: False where another rank says it."""
        missing_features.append(self.name)
        if say:
            logger.warning("serving without %s: %s", self.name, reason)

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
            feature.leave_out(f"this release lacks or changed {', '.join(unknown)}")
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


@cache
def known_calls() -> Mapping[str, list[str]]:
    """Return how each hooked or used name is called in the releases that the package is tested with."""
    known: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_signatures.json").read_text())
    return known


def call_of(name: str) -> str | None:
    """Return how a dotted name is called, such as `async (obj, *, stream=...)`; None if the release lacks it.

    Annotations and the values of defaults are left out, because no call depends on them.
    """
    owner, _, attribute = name.rpartition(".")
    try:
        found = inspect.getattr_static(pkgutil.resolve_name(owner), attribute)
        kind = "" if inspect.isfunction(found) else type(found).__name__
        if isinstance(found, type):
            return "class"
        function = inspect.unwrap(getattr(found, "fget", getattr(found, "__func__", found)))  # below its hooks
        parameters = [_bare(parameter) for parameter in inspect.signature(function).parameters.values()]
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    waits = "async" * (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))
    yields = "yields" * (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function))
    return " ".join(filter(None, [kind, waits, yields, str(inspect.Signature(parameters))]))


def first_of(*names: str) -> str:
    """Return the first of the names that this release has, for a function that moved; the first if it has none."""
    return next((name for name in names if call_of(name) is not None), names[0])


class _Default:
    def __repr__(self) -> str:
        return "..."


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default if parameter.default is parameter.empty else _Default()
    return parameter.replace(annotation=parameter.empty, default=default)


def _unknown(name: str) -> str | None:
    """Return the name and what is unknown about it; None if all is well."""
    known, found = known_calls().get(name), call_of(name)
    if found is None:
        return name
    return None if known is None or found in known else f"{name} is {found} (known: {' or '.join(known)})"


def _unknown_release(feature: str, names: list[str]) -> KimiError:
    return KimiError(
        f"this SGLang release lacks or changed functions that the plugin uses for {feature}: {', '.join(names)}",
        where="kimi_w4a8_eagle3.sglang_plugin",
        expected="a release that this package is tested with",
        remedy="install one that `kimi-w4a8 doctor` names",
    )

"""The part of SGLang's plugin framework that a plugin needs, for releases that have none (before 0.5.11).

Contract. Patch `sglang-load-plugins` makes each process of the server (launcher, scheduler, detokenizer,
data-parallel controller) call `load_plugins()` before anything else. That call

1. uses SGLang's own framework when the release has one, and otherwise makes `sglang.srt.plugins` and
   `sglang.srt.plugins.hook_registry` importable, with `HookRegistry.register/apply_hooks/reset`, `HookType` and
   `plugin_hook` of the same names, arguments and meaning as in 0.5.11 and later;
2. calls every entry point of the group `sglang.srt.plugins` (restricted by SGLANG_PLUGINS, a comma-separated list);
3. applies the registered hooks.

Unlike SGLang, which logs and goes on, a plugin or hook that fails here ends the process: a server without its MoE
scheme would only fail later, and less clearly. A plugin's `register()` sees the module layout of the release it
runs in: which targets exist in 0.5.10rc0 is for the plugin to know.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from enum import Enum
from importlib import metadata
from types import ModuleType
from typing import Any, ClassVar

from ..errors import KimiError

GROUP = "sglang.srt.plugins"
logger = logging.getLogger(__name__)
_loaded: list[str] | None = None


class HookType(Enum):
    """When a hook runs relative to its target."""

    BEFORE = "before"  # hook(*args, **kwargs) -> (args, kwargs) or None
    AFTER = "after"  # hook(result, *args, **kwargs) -> new result or None
    AROUND = "around"  # hook(original, *args, **kwargs) -> result
    REPLACE = "replace"  # hook(*args, **kwargs) -> result, or a class for a class


class HookRegistry:
    """Hooks by the dotted path of their target; `apply_hooks` puts them in place once."""

    _hooks: ClassVar[dict[str, list[tuple[HookType, Any]]]] = {}
    _originals: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(
        cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER, *, source: object | None = None
    ) -> None:
        """Remember `hook` for `target` (`package.module.attribute` or `package.module.Class.method`)."""
        if isinstance(hook, type) and hook_type is not HookType.REPLACE:
            raise TypeError(f"{hook.__name__}: a class can only REPLACE a class")
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        """Wrap every target that is not wrapped yet; replaced classes first, so that methods are found in them."""
        replaced = [t for t, hooks in cls._hooks.items() if any(isinstance(hook, type) for _, hook in hooks)]
        for target in [*replaced, *(t for t in cls._hooks if t not in replaced)]:
            if target not in cls._originals:
                cls._originals[target] = _apply(target, cls._hooks[target])

    @classmethod
    def reset(cls) -> None:
        """Forget all hooks; targets that are already wrapped stay wrapped."""
        cls._hooks.clear()
        cls._originals.clear()


def plugin_hook(target: str, type: HookType = HookType.AFTER) -> Callable[[Any], Any]:
    """Decorator: register the decorated function or class as a hook on `target` and return it unchanged."""

    def register(hook: Any) -> Any:
        HookRegistry.register(target, hook, type)
        return hook

    return register


def load_plugins() -> list[str]:
    """Load all plugins once in this process; returns their names. Safe to call again.

    Raises:
        KimiError: when a plugin cannot be loaded or a hook's target does not exist.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    _loaded = []
    if _framework_exists():
        importlib.import_module(GROUP).load_plugins()
        return _loaded
    _install_framework()
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    for entry_point in metadata.entry_points(group=GROUP):
        if allowed and entry_point.name not in allowed:
            logger.info("plugin %s skipped: not in SGLANG_PLUGINS", entry_point.name)
            continue
        try:
            entry_point.load()()
        except Exception as error:
            raise KimiError(
                f"the plugin {entry_point.name} failed to load: {error}", where=entry_point.value
            ) from error
        _loaded.append(entry_point.name)
    HookRegistry.apply_hooks()
    logger.info("plugins loaded: %s", ", ".join(_loaded) or "none")
    return _loaded


def _framework_exists() -> bool:
    try:
        return importlib.util.find_spec(GROUP) is not None
    except (ImportError, ValueError):
        return False


def _install_framework() -> None:
    """Make the two modules importable under SGLang's names, as attributes of their parents too."""
    package, registry = ModuleType(GROUP), ModuleType(f"{GROUP}.hook_registry")
    package.__path__ = []
    for module in (package, registry):
        for member in (HookRegistry, HookType, plugin_hook):
            setattr(module, member.__name__, member)
        sys.modules[module.__name__] = module
    package.load_plugins = load_plugins  # type: ignore[attr-defined]
    package.hook_registry = registry  # type: ignore[attr-defined]
    parent = sys.modules.get("sglang.srt")
    if parent is not None:
        parent.plugins = package  # type: ignore[attr-defined]


def _apply(target: str, hooks: list[tuple[HookType, Any]]) -> Any:
    """Replace the target by its wrapped self wherever it was imported to; returns the original."""
    owner_path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
        raw = vars(owner).get(name, None) if isinstance(owner, type) else None
        original = getattr(owner, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise KimiError("the target of a hook does not exist in this SGLang", where=f"{target}: {error}") from error
    descriptor = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    wrapped = raw.__func__ if isinstance(raw, classmethod | staticmethod) else original
    for kind, hook in sorted(hooks, key=lambda pair: pair[0] is not HookType.REPLACE):
        if isinstance(wrapped, type) and not isinstance(hook, type):
            raise KimiError("a class can only be replaced by a class", where=target)
        wrapped = hook if isinstance(hook, type) else _wrap(wrapped, hook, kind)
    setattr(owner, name, descriptor(wrapped) if descriptor else wrapped)
    if not isinstance(owner, type):
        _rebind(original, wrapped)
    return original


def _wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.REPLACE:
            return hook(*args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


def _rebind(original: Any, wrapped: Any) -> None:
    """`from module import name` copied the original into other modules: point those names at the wrapper."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, wrapped)

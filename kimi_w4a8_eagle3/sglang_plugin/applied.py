"""Hooks fail closed: a process ends when SGLang could not apply one of them, and names the hook.

SGLang would log "Failed to apply hooks" and serve without the page guard or the door.
"""

from __future__ import annotations

from typing import Any

from ..base.errors import KimiError, or_end


def require_applied(registry: Any) -> None:
    """Make `HookRegistry.apply_hooks` end the process unless every hook registered so far was applied."""
    registered = set(registry._hooks)
    apply_hooks = registry.apply_hooks

    def apply_and_check() -> None:
        apply_hooks()
        with or_end("the plugin's hooks cannot be checked"):
            if missing := sorted(registered - registry._patched):
                raise KimiError(
                    f"this SGLang release has no {', '.join(missing)}, which the plugin changes",
                    where="kimi_w4a8_eagle3.sglang_plugin",
                    expected="a release that this package is tested with",
                    remedy="`kimi-w4a8 doctor` names them; the lines 'Failed to apply hooks' above say why",
                )

    registry.apply_hooks = apply_and_check

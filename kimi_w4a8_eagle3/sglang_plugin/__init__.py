"""The SGLang plugin: the only package that imports sglang.

`register` is the `sglang.srt.plugins` entry point; SGLang calls it in every process before it builds anything. It
adds the W4A8 scheme for AMD Quark's two-stage checkpoints and caps the KV pool at the int32 page-offset limit;
every other checkpoint behaves as before.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.errors import KimiError


def register() -> None:
    """Register our hooks with SGLang's HookRegistry; SGLang applies them, and imports their targets, afterwards.

    Ends the process when one cannot be had: SGLang logs an Exception of a plugin and goes on to serve, the door wide
    open.
    """
    with or_end("the plugin cannot be installed"):
        _register()


@contextmanager
def or_end(what: str) -> Iterator[None]:
    """End the process with one message where an exception would be logged and forgotten."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, KimiError) else f"{what}, so nothing is served: {error!r:.200}"
        raise SystemExit(f"kimi: {reason}") from error


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..gates import read_gates
    from . import (
        cpu,
        door,
        failing_requests,
        full_disk,
        grammar_cache,
        metrics_hook,
        model_name_hook,
        orphans,
        page_guard_hook,
        pulse_hook,
        quark_hook,
        shared_memory,
    )

    orphans.end_with_parent()
    full_disk.install()
    HookRegistry.register(quark_hook.TARGET, quark_hook.from_config, HookType.AROUND)
    page_guard_hook.install(HookRegistry)
    metrics_hook.install(HookRegistry)
    failing_requests.install(HookRegistry)
    HookRegistry.register(grammar_cache.TARGET, grammar_cache.forget_oldest, HookType.AFTER)
    HookRegistry.register(grammar_cache.COMPILER, grammar_cache.bound_compiler, HookType.BEFORE)
    HookRegistry.register(pulse_hook.TARGET, pulse_hook.beat, HookType.BEFORE)
    HookRegistry.register(shared_memory.TARGET, shared_memory.write_down, HookType.AFTER)
    if read_gates(os.environ).check_model_name:
        HookRegistry.register(model_name_hook.TARGET, model_name_hook.handle_request, HookType.AROUND)
    if cpu.installed():
        from .cpu import fp8_linear

        HookRegistry.register(fp8_linear.TARGET, fp8_linear.get_linear_scheme, HookType.AROUND)
        cpu.claim_attention_backend()
    door.install(HookRegistry)  # imports what it stands in front of, so after everything that SGLang reads then
    # A process that hangs prints its stacks into the server's log when the watchdog asks: in a container py-spy may not
    # look into it, because no capability reaches a user that is not root.
    faulthandler.register(signal.SIGUSR1, file=2)

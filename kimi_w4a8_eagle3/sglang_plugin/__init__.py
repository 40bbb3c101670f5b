"""The SGLang plugin: the only package that imports sglang.

`register` is the `sglang.srt.plugins` entry point; SGLang calls it in every process before it builds anything. It
adds the W4A8 scheme for AMD Quark's two-stage checkpoints and caps the KV pool at the int32 page-offset limit;
every other checkpoint behaves as before.
"""

from __future__ import annotations


def register() -> None:
    """Register our hooks with SGLang's HookRegistry; importing sglang's models waits until the hooks are applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import cpu, quark_hook

    HookRegistry.register(quark_hook.TARGET, quark_hook.from_config, HookType.AROUND)
    if cpu.installed():
        cpu.claim_attention_backend()

"""The SGLang plugin of engines on a CPU. It and the plugin of kimi_w4a8_eagle3 may be loaded in any order."""

from __future__ import annotations

import os

from kimi_w4a8_eagle3.base.errors import or_end
from kimi_w4a8_eagle3.sglang_plugin import hooks
from kimi_w4a8_eagle3.sglang_plugin.hooks import Feature, Hook

from . import cpu, virtual


def register() -> None:
    """Register the CPU's hooks with SGLang's HookRegistry; a failure ends the process.

    Does nothing in an engine on a GPU. SGLang calls it in every process before it builds anything.
    """
    with or_end("the CPU's plugin cannot be installed"):
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or virtual.wanted():
            from .tiny import processor  # start-up: imports transformers

            processor.register()
        if cpu.installed():
            _register()
        if virtual.wanted():
            virtual.register_hooks()


def _register() -> None:
    # SGLang's import order: `cpu.install` runs before the first import of sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    # Start-up: these import torch, and only an engine on a CPU needs them.
    from .cpu import (
        batch_invariant,
        dp_controller,
        fp8_linear,
        gloo_thread,
        mla_draft,
        nccl,
        padded_groups,
    )

    gloo_thread.install()
    batch_invariant.register()
    cpu.claim_attention_backend()
    feature = Feature(
        "engines on a CPU",
        remove_when="SGLang serves an AMD Quark checkpoint with EAGLE3 on a CPU without sgl_kernel",
        hooks=[
            Hook(batch_invariant.TARGET, "around", batch_invariant.get_handler),
            Hook(fp8_linear.TARGET, "around", fp8_linear.get_linear_scheme),
            Hook(dp_controller.TARGET, "replace", dp_controller.event_loop),
            Hook(nccl.TARGET, "replace", nccl.find_nccl_library),
            Hook(padded_groups.DECODE, "around", padded_groups.attend),
            Hook(padded_groups.EXTEND, "around", padded_groups.attend),
            Hook(mla_draft.EMBED, "replace", mla_draft.set_embed),
            Hook(mla_draft.EMBED_AND_HEAD, "replace", mla_draft.set_embed_and_head),
        ],
    )
    hooks.register(HookRegistry, [feature])

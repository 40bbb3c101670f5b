"""The SGLang plugin: the only package that imports sglang.

`register` is the `sglang.srt.plugins` entry point; SGLang calls it in every process before it builds anything. It
adds the W4A8 scheme for AMD Quark's two-stage checkpoints and caps the KV pool at the int32 page-offset limit;
every other checkpoint behaves as before.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal

from ..base.errors import or_end
from ..gates import read_gates
from .applied import require_applied


def register() -> None:
    """Register our hooks with SGLang's HookRegistry, which applies them later and imports their targets then.

    A failure ends the process. SGLang would only log a plugin's exception and serve without the door.
    """
    with or_end("the plugin cannot be installed"):
        _register()


def _register() -> None:
    # SGLang's import order: `cpu.install` runs before the first import of sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Start-up: programs that need only `cpu` import this package, too.
    from . import (
        adaptive_hook,
        cpu,
        door,
        exact_sampling,
        failing_requests,
        full_disk,
        grammar_cache,
        load_check,
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
    HookRegistry.register(adaptive_hook.TARGET, adaptive_hook.refuse, HookType.AFTER)
    HookRegistry.register(adaptive_hook.FORWARD, adaptive_hook.choose_steps, HookType.BEFORE)
    HookRegistry.register(adaptive_hook.PREFILL, adaptive_hook.skip_prefill, HookType.AROUND)
    HookRegistry.register(quark_hook.TARGET, quark_hook.from_config, HookType.AROUND)
    HookRegistry.register(load_check.TARGET, load_check.note_folder, HookType.AFTER)
    page_guard_hook.install(HookRegistry)
    metrics_hook.install(HookRegistry)
    failing_requests.install(HookRegistry)
    exact_sampling.install(HookRegistry)
    HookRegistry.register(grammar_cache.TARGET, grammar_cache.forget_oldest, HookType.AFTER)
    HookRegistry.register(grammar_cache.BACKEND, grammar_cache.compile_few, HookType.AFTER)
    HookRegistry.register(grammar_cache.COMPILER, grammar_cache.bound_compiler, HookType.BEFORE)
    HookRegistry.register(pulse_hook.TARGET, pulse_hook.beat, HookType.BEFORE)
    HookRegistry.register(shared_memory.TARGET, shared_memory.write_down, HookType.AFTER)
    if read_gates(os.environ).check_model_name:
        HookRegistry.register(model_name_hook.TARGET, model_name_hook.handle_request, HookType.AROUND)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from ..tiny import processor  # start-up: imports transformers, which only the built-in model on a CPU needs

        processor.register()
    if cpu.installed():
        # Start-up: these import torch, and only an engine on a CPU needs them.
        from .cpu import batch_invariant, fp8_kv, fp8_linear, gloo_thread, mla_draft, nccl

        gloo_thread.install()
        batch_invariant.register()
        HookRegistry.register(batch_invariant.TARGET, batch_invariant.get_handler, HookType.AROUND)
        HookRegistry.register(fp8_linear.TARGET, fp8_linear.get_linear_scheme, HookType.AROUND)
        HookRegistry.register(fp8_kv.TARGET, fp8_kv.configure_kv_cache_dtype, HookType.AROUND)
        HookRegistry.register(nccl.TARGET, nccl.find_nccl_library, HookType.REPLACE)
        HookRegistry.register(mla_draft.EMBED, mla_draft.set_embed, HookType.REPLACE)
        HookRegistry.register(mla_draft.EMBED_AND_HEAD, mla_draft.set_embed_and_head, HookType.REPLACE)
        cpu.claim_attention_backend()
    if multiprocessing.parent_process() is None:  # schedulers and detokenizers do not need the HTTP server's imports
        from . import tool_calls  # SGLang's import order: it imports SGLang's parsers and HTTP server

        tool_calls.install()
        HookRegistry.register(door.TARGET, orphans.end_with_supervisor, HookType.BEFORE)
        door.install(HookRegistry)  # last: it imports the HTTP server, which reads the environment at its import
    require_applied(HookRegistry)
    # The watchdog sends SIGUSR1 to a hanging process, which then prints its stacks into the engine's log.
    faulthandler.register(signal.SIGUSR1, file=2)

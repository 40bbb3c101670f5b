"""The SGLang plugin: the only package that imports sglang.

`register` is the `sglang.srt.plugins` entry point. SGLang calls it in every process before it builds anything. It
registers features: the W4A8 scheme for AMD Quark's checkpoints, the page guard, exact sampling, the door, and others.
Each feature is a `Feature` in a module of a room (`model/`, `decoding/`, `memory/`, `upkeep/`, `http/`), with its
hooks and with the change in SGLang that makes it unnecessary. The table in docs/hooks.md lists all of them, and a test
compares it with the code.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal

from ..base.errors import or_end
from . import hooks


@or_end("the plugin cannot be installed")
def register() -> None:
    """Register our hooks with SGLang's HookRegistry, which applies them later and imports their targets then.

    A failure ends the process. SGLang would only log a plugin's exception and serve without the door.
    """
    # SGLang's import order: on a CPU `run_module` runs before the first import of sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    # Start-up: programs that need only one of these import this package, too.
    from .decoding import exact_sampling, kept_thinking
    from .memory import page_guard_hook
    from .model import load_check, quark_config
    from .upkeep import (
        failing_outputs,
        failing_requests,
        full_disk,
        grammar_cache,
        local_store,
        metrics_hook,
        nan_logits,
        orphans,
        pulse_hook,
        shared_memory,
    )

    orphans.end_with_parent()
    full_disk.install()
    parts = (
        exact_sampling, failing_outputs, failing_requests, grammar_cache, kept_thinking, load_check,
        local_store, nan_logits, page_guard_hook, pulse_hook, quark_config, shared_memory,
    )  # fmt: skip
    features = [metrics_hook.ENGINE, metrics_hook.REQUESTS, *(part.FEATURE for part in parts)]
    if multiprocessing.parent_process() is None:  # schedulers and detokenizers do not need the HTTP server's imports
        # SGLang's import order: its parsers and HTTP server
        from .http import (
            answer_parsers,
            chat_contract,
            collect_hook,
            door,
            large_requests,
            messages_contract,
            responses_contract,
        )  # fmt: skip

        answer_parsers.install()
        http_parts = (
            answer_parsers, chat_contract, large_requests, messages_contract, orphans, responses_contract,
        )  # fmt: skip
        features += [part.FEATURE for part in http_parts]
        features += [collect_hook.FEATURE] if os.environ.get(collect_hook.VARIABLE) else []
        features += door.features()  # last: it imports the HTTP server, which reads the environment at its import
    hooks.register(HookRegistry, features)
    # The watchdog sends SIGUSR1 to a hanging process, which then prints its stacks into the engine's log.
    faulthandler.register(signal.SIGUSR1, file=2)

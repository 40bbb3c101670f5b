"""The SGLang plugin: of what serves, the only folder that imports sglang.

`register` is the `sglang.srt.plugins` entry point. SGLang calls it in an engine's main process and in each scheduler,
before it builds anything there; a detokenizer of 0.5.20 loads no plugins. It registers features: the W4A8 scheme for
AMD Quark's checkpoints, the page guard, exact sampling, and others. Each feature is a `Feature` in a module
of a folder (`model/`, `prefill/`, `decoding/`, `memory/`, `upkeep/`), with its hooks and with the change in
SGLang that makes it unnecessary. The table in docs/hooks.md lists all of them, and a test compares it with the code.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import sys
from importlib import import_module

from ..base.errors import or_end
from ..engine.given_folder import given_folder
from . import hooks
from .served_model import is_foreign

_EVERYWHERE = (  # what each process of an engine registers
    "upkeep.metrics_hook", "decoding.exact_sampling", "decoding.kept_thinking", "memory.page_guard_hook",
    "model.load_check", "model.quark_config", "upkeep.failing_outputs", "upkeep.failing_requests",
    "upkeep.grammar_cache", "upkeep.local_store", "upkeep.nan_logits", "upkeep.pulse_hook", "upkeep.shared_memory",
    "prefill.input_scattered", "model.dense_fp8",
)  # fmt: skip
_HTTP = ("upkeep.orphans", "upkeep.private")  # what the process with the HTTP server registers, too


@or_end("the plugin cannot be installed")
def register() -> None:
    """Register our hooks with SGLang's HookRegistry, which applies them later; their targets are imported now.

    A failure ends the process. SGLang would only log a plugin's exception and serve without the plugin. Nothing is
    registered for the server of another model that was started without `kimi-w4a8 serve`.
    """
    if given_folder() is None and is_foreign(sys.argv[1:]):
        return
    # SGLang's import order: on a CPU `run_module` runs before the first import of sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    from .upkeep import full_disk, orphans  # start-up: programs that need only one of these import this package, too

    orphans.end_with_parent()
    full_disk.install()
    features = [feature for name in _EVERYWHERE for feature in _features_of(name)]
    if multiprocessing.parent_process() is None:  # a scheduler does not need the HTTP server's imports
        features += [feature for name in _HTTP for feature in _features_of(name)]
    hooks.register(HookRegistry, features)
    # The watchdog sends SIGUSR1 to a hanging process, which then prints its stacks into the engine's log.
    faulthandler.register(signal.SIGUSR1, file=2)


def _features_of(name: str) -> list[hooks.Feature]:
    module = import_module(f"{__name__}.{name}")  # start-up: see `register`
    return [value for value in vars(module).values() if isinstance(value, hooks.Feature)]

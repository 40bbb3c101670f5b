"""Runs SGLang and counts each step of its scheduler on the virtual node: a JSON line in the file KIMI_VIRTUAL_COUNTS.

A step begins where the scheduler runs a batch and ends where it runs the next one, so it holds the results of the batch
before and the building of the next. Calls are of Python functions outside of the stand-ins.
"""

from __future__ import annotations

import json
import os
import sys
from cProfile import Profile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import kimi_w4a8_laptop
from kimi_w4a8_eagle3.sglang_plugin.run_module import run
from kimi_w4a8_laptop.virtual import kernel_launch, library

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
FILE = "KIMI_VIRTUAL_COUNTS"
_LAPTOP = str(Path(kimi_w4a8_laptop.__file__).parent)
_profile = Profile(builtins=False)
_under_way: dict[str, Any] = {}


def begin(_: Scheduler, batch: ScheduleBatch, *__: object, **___: object) -> None:
    """BEFORE hook of `run_batch`: write the step that ends here, and begin to count the next."""
    _profile.disable()
    if _under_way:
        step = {**_under_way, "counts": library.report(), "python calls": sum(map(_calls, _profile.getstats()))}
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(step) + "\n")
    _under_way.update(mode=batch.forward_mode.name, requests=len(batch.reqs))
    library.reset()
    _profile.clear()
    kernel_launch.not_counting[:] = [_profile]
    _profile.enable()


def _calls(entry: Any) -> int:
    """Return the calls of a profile's entry; its code is a string for functions that are not Python's."""
    code = entry.code
    return 0 if isinstance(code, str) or code.co_filename.startswith(_LAPTOP) else entry.callcount


if __name__ == "__main__":
    HookRegistry.register(TARGET, begin, HookType.BEFORE)
    run(sys.argv[1], sys.argv[2:])

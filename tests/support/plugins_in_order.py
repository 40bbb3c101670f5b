"""Run by `run_module`: load SGLang's plugins in the order of argv[2:] and write what they changed to argv[1]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang.srt import plugins

if __name__ == "__main__":
    output, *order = sys.argv[1:]
    found = {entry.name: entry for entry in plugins.entry_points(group=plugins.GENERAL_PLUGINS_GROUP)}
    plugins.entry_points = lambda group: [found[name] for name in order]
    plugins.load_plugins()
    from sglang.srt.distributed.device_communicators import pynccl_wrapper
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_platform

    nccl = pynccl_wrapper.find_nccl_library.__module__
    facts = {"hooks": sorted(HookRegistry._patched), "nccl": nccl, "amx": get_platform().has_amx}
    facts["checked twice"] = hasattr(HookRegistry.apply_hooks.__wrapped__, "__wrapped__")
    Path(output).write_text(json.dumps(facts))

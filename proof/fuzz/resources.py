"""Resources of an engine without requests: slots, tokens of the cache, memory, descriptors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.door.shares import BODIES
from kimi_w4a8_eagle3.sglang_plugin.upkeep.grammar_cache import MAX_COMPILER_BYTES

from ..load.engine_loads import RUNNING, USED, WAITING, engine_loads

_SETTLE_S = 60.0
_POLL_S = 0.5
# Without it a CPU engine keeps about 0.7 MiB for each of the last 1,024 sizes of matrices (docs/reliability.md), which
# hides what a request makes it keep.
NO_KERNEL_CACHE = "env.ONEDNN_MAX_CPU_ISA=AVX2"
# What an engine keeps once: xgrammar's compiled grammars, and free memory that the C library does not give back. The
# largest part of that held bodies of one client (`python -m proof.admission connections`). More is a fault.
MEMORY_BYTES = MAX_COMPILER_BYTES + BODIES // 2 * DoorSettings().max_body_bytes
_DESCRIPTORS = 16  # kept connections that were not yet found dead


@dataclass(frozen=True)
class Resources:
    """running, waiting: requests. tokens: of the KV cache that no other request may take. memory: resident bytes."""

    running: int
    waiting: int
    tokens: int
    memory: int = 0
    descriptors: int = 0

    def beyond(self, before: Resources) -> Iterator[str]:
        """Yield the resources that exceed `before`, in words."""
        for name in ("running", "waiting", "tokens"):
            had, has = getattr(before, name), getattr(self, name)
            if has > had:
                yield f"{name}: {has}, before {had}"
        if self.memory > before.memory + MEMORY_BYTES:
            yield f"memory: {self.memory / 2**20:.0f} MiB, before {before.memory / 2**20:.0f} MiB"
        if self.descriptors > before.descriptors + _DESCRIPTORS:
            yield f"descriptors: {self.descriptors}, before {before.descriptors}"


async def settled(base_url: str, pid: int | None, before: Resources | None) -> Resources:
    """Return the resources once nothing runs and none exceeds `before`, or after a minute."""
    until = time.monotonic() + _SETTLE_S
    while True:
        found = await asyncio.to_thread(engine_resources, base_url, pid)
        idle = not found.running and not found.waiting and not (before and list(found.beyond(before)))
        if idle or time.monotonic() > until:
            return found
        await asyncio.sleep(_POLL_S)


def engine_resources(base_url: str, pid: int | None) -> Resources:
    """Return the resources of now."""
    loads = engine_loads(base_url)
    memory = descriptors = 0
    if pid is not None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    memory += member.memory_info().rss
                    descriptors += member.num_fds()
    return Resources(loads[RUNNING], loads[WAITING], loads[USED], memory, descriptors)

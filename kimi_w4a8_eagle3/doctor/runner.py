"""Run of all checks; a check that raises is reported and does not stop the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..base.finding import Finding
from ..recipe.launch import Launch
from . import gpus, host, software, storage
from .facts import Facts
from .probe import Probe
from .result import Report, fail, skip

Check = Callable[[Facts], Finding | list[Finding]]

CHECKS: tuple[Check, ...] = (
    *(gpus.gpus, gpus.arch, gpus.partition, gpus.hbm),
    *(host.driver, host.rocm, host.devices, host.numa, host.numa_balancing, host.shm, host.memlock, host.nofile),
    *(software.base, software.sglang, software.known_faults, software.plugin, software.torch, software.kernels),
    *(software.patches, storage.checkpoints, storage.disk, storage.memory, host.port, host.processes),
)

# Checks that a recipe for a CPU skips, and checks that also need a GPU to look at.
FOR_GPUS = {
    host.driver,
    host.rocm,
    host.devices,
    host.numa_balancing,
    host.memlock,
    software.base,
    software.patches,
    storage.memory,
}
OF_GPUS = {gpus.arch, gpus.partition, gpus.hbm, host.numa}


def examine(probe: Probe, asked: Launch) -> Report:
    """Return all results for one machine and one recipe."""
    facts = Facts(probe, asked)
    results = [result for check in CHECKS for result in _run(check, facts)]
    numa_nodes = None
    with suppress(Exception):  # the numa check reports the reason
        numa_nodes = facts.machine.numa_nodes
    return Report(asked.recipe.name, tuple(results), numa_nodes)


def _run(check: Check, facts: Facts) -> list[Finding]:
    name = check.__name__
    try:
        if check in FOR_GPUS | OF_GPUS and not facts.gpus:
            return [skip("not needed on a CPU", name)]
        if check in OF_GPUS and not facts.count:
            return [skip("no GPU found", name)]
        results = check(facts)
    except Exception as error:  # an unexpected machine must not hide the results of other checks
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return [fail(found, "report this with the output of `kimi-w4a8 doctor --json`", name)]
    return [replace(one, name=one.name or name) for one in (results if isinstance(results, list) else [results])]

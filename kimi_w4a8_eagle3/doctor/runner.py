"""Run of all checks; a check that raises is reported and does not stop the others."""

from __future__ import annotations

from collections.abc import Callable

from ..base.finding import Finding
from . import gpus, host, software, storage
from .facts import Facts
from .needs import Needs
from .probe import Probe
from .result import Report, fail, skip

Check = Callable[[Facts], Finding | list[Finding]]

CHECKS: tuple[Check, ...] = (
    gpus.gpus,
    gpus.arch,
    gpus.partition,
    gpus.hbm,
    host.driver,
    host.rocm,
    host.devices,
    host.numa,
    host.numa_balancing,
    host.shm,
    host.memlock,
    host.nofile,
    software.base,
    software.engine,
    software.known_faults,
    software.plugin,
    software.torch,
    software.kernels,
    software.router,
    software.patches,
    storage.checkpoints,
    storage.disk,
    host.port,
    host.processes,
)

# Checks that a recipe for a CPU skips, and checks that also need a GPU to look at.
FOR_GPUS = {host.driver, host.rocm, host.devices, host.numa_balancing, host.memlock, software.base, software.patches}
OF_GPUS = {gpus.arch, gpus.partition, gpus.hbm, host.numa}


def examine(probe: Probe, needs: Needs) -> Report:
    """Return all results for one machine and one recipe."""
    facts = Facts(probe, needs)
    results = [result for check in CHECKS for result in _run(check, facts)]
    return Report(needs.recipe, tuple(results), _numa_nodes(facts))


def _run(check: Check, facts: Facts) -> list[Finding]:
    name = check.__name__
    try:
        if check in FOR_GPUS | OF_GPUS and not facts.needs.on_gpu:
            return [skip(name, "not needed on a CPU")]
        if check in OF_GPUS and not facts.count:
            return [skip(name, "no GPU found")]
        results = check(facts)
    except Exception as error:  # an unexpected machine must not hide the results of other checks
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return [fail(name, found, "report this with the output of `kimi-w4a8 doctor --json`")]
    return results if isinstance(results, list) else [results]


def _numa_nodes(facts: Facts) -> list[int] | None:
    try:
        return facts.numa_nodes
    except Exception:
        return None  # the numa check reports the reason

"""Run of all checks; a check that raises is reported and does not stop the others."""

from __future__ import annotations

from collections.abc import Callable

from . import gpus, host, software, storage
from .facts import Facts
from .needs import Needs
from .probe import Probe
from .result import Report, Result, fail

Check = Callable[[Facts], Result | list[Result]]

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
    software.python,
    software.sglang,
    software.known_faults,
    software.vllm,
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


def examine(probe: Probe, needs: Needs) -> Report:
    """Return all results for one machine and one recipe."""
    facts = Facts(probe, needs)
    results = [result for check in CHECKS for result in _run(check, facts)]
    return Report(needs.recipe, tuple(results), _numa_nodes(facts))


def _run(check: Check, facts: Facts) -> list[Result]:
    name = check.__name__
    try:
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

"""Checks of what runs already: the port, and servers that were left behind."""

from __future__ import annotations

import re

from .facts import Facts
from .result import Result, fail, ok, warn

# SGLang and vLLM rename their workers (`sglang::scheduler_TP0`, `VLLM::Worker_TP0`).
ENGINE = re.compile(r"sglang[.:]|sglang serve|vllm serve|vllm\.entrypoints|VLLM::", re.IGNORECASE)
SHOWN = 4


def port(facts: Facts) -> Result:
    """The server's port is free."""
    needs = facts.needs
    problem = facts.probe.port_problem(needs.host, needs.port)
    if problem:
        return fail("port", problem, "stop that process, or choose another port with --port")
    return ok("port", f"{needs.port} on {needs.host} is free")


def processes(facts: Facts) -> Result:
    """No engine is left from an earlier run; it would hold memory, ports or shared memory."""
    found = [process for process in facts.probe.processes() if _is_engine(process.command)]
    if not found:
        return ok("processes", "no other engine runs")
    numbers = [str(process.pid) for process in found]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    shown = ", ".join(f"{process.pid} ({process.command.strip()[:50].strip()})" for process in found[:SHOWN])
    remedy = f"if nobody needs them: kill {' '.join(numbers)}"
    return warn("processes", f"{len(found)} engine processes: {shown}{more}", remedy)


def _is_engine(command: str) -> bool:
    """An engine's process: a module or program of one, not an editor that has its source open."""
    words = command.split()
    head = " ".join(words[:6])
    runs_python = bool(words) and "python" in words[0]
    return bool(ENGINE.match(command)) or (runs_python and "-m" in words[:4] and bool(ENGINE.search(head)))

"""Results of the checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..base.severity import Severity

_VERDICTS = (Severity.OK, Severity.WARN, Severity.FAIL, Severity.SKIP)


@dataclass(frozen=True)
class Result:
    """One result: what was found, and for `warn` and `fail` the remedy."""

    name: str
    verdict: Severity
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All results for one recipe; `numa_nodes` is this machine's `--numa-node` list, None if unknown."""

    recipe: str
    results: tuple[Result, ...]
    numa_nodes: list[int] | None

    @property
    def failed(self) -> bool:
        return any(result.verdict is Severity.FAIL for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Return plain data; `verdict` is `fail` or `ok`, and counts are by verdict."""
        counts = {verdict.value: sum(r.verdict is verdict for r in self.results) for verdict in _VERDICTS}
        checks = [asdict(result) | {"verdict": result.verdict.value} for result in self.results]
        verdict = "fail" if self.failed else "ok"
        head = {"recipe": self.recipe, "verdict": verdict, "counts": counts, "numa_node": self.numa_nodes}
        return head | {"checks": checks}


def ok(name: str, found: str) -> Result:
    return Result(name, Severity.OK, found)


def warn(name: str, found: str, remedy: str) -> Result:
    return Result(name, Severity.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Result:
    return Result(name, Severity.FAIL, found, remedy)


def skip(name: str, why: str) -> Result:
    return Result(name, Severity.SKIP, why)

"""Results of the checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..base.finding import Finding, Severity


@dataclass(frozen=True)
class Report:
    """All results for one recipe; `numa_nodes` is this machine's `--numa-node` list, None if unknown."""

    recipe: str
    results: tuple[Finding, ...]
    numa_nodes: list[int] | None

    @property
    def failed(self) -> bool:
        return any(result.severity is Severity.FAIL for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        severities = [result.severity for result in self.results]
        return {one.value: severities.count(one) for one in (Severity.OK, Severity.WARN, Severity.FAIL, Severity.SKIP)}

    def as_json(self) -> dict[str, Any]:
        """Return plain data; `verdict` is `fail` or `ok`, and counts are by severity."""
        verdict = "fail" if self.failed else "ok"
        head = {"recipe": self.recipe, "verdict": verdict, "counts": self.counts, "numa_node": self.numa_nodes}
        return head | {"checks": [asdict(result) for result in self.results]}


# Results of a check, which has the name of its function unless it names its parts.


def ok(found: str, name: str = "") -> Finding:
    return Finding(found, Severity.OK, name)


def warn(found: str, remedy: str, name: str = "") -> Finding:
    return Finding(found, Severity.WARN, name, remedy=remedy)


def fail(found: str, remedy: str, name: str = "") -> Finding:
    return Finding(found, Severity.FAIL, name, remedy=remedy)


def skip(why: str, name: str = "") -> Finding:
    return Finding(why, Severity.SKIP, name)

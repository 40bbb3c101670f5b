"""Fail when a requirement of a distribution, or of anything that it requires, is missing or has another version.

    python3 check_closure.py 'kimi-w4a8-eagle3[bench,eval]'

`pip check` would also complain about the base image's own inconsistencies; this looks at one distribution only.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement


def problems(root: str) -> list[str]:
    """One line for every unmet requirement reachable from `root`."""
    found: list[str] = []
    seen: set[str] = set()
    todo = [(Requirement(root), "the command line")]
    while todo:
        requirement, wanted_by = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(f"{requirement} (for {wanted_by}) is not installed")
            continue
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            found.append(f"{requirement} (for {wanted_by}), but {distribution.version} is installed")
        for line in distribution.requires or []:
            needed = Requirement(line)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {*extras, ""}):
                todo.append((needed, requirement.name))
    return sorted(found)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: check_closure.py REQUIREMENT...")
    lines = [line for argument in sys.argv[1:] for line in problems(argument)]
    print("\n".join(lines) or f"{', '.join(sys.argv[1:])}: all requirements are met")
    sys.exit(1 if lines else 0)

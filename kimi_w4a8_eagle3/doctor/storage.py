"""Checks of the checkpoints: presence on this machine, access to the Hub, and space for missing files."""

from __future__ import annotations

import re
from pathlib import Path

from rich.filesize import decimal

from ..base.files import shortage
from ..base.finding import Finding
from ..fetch.download import Repository
from ..recipe.schema import RecipeCheckpoint
from .facts import Facts
from .result import fail, ok, skip, warn

# Bytes of the published checkpoints, for a machine without access to the Hub. The published "497 GB" are GiB: the INT4
# experts alone are 384 x 60 x 3 x 7168 x 2048 / 2 = 507.3 GB.
PUBLISHED_SIZES = {
    "amd/Kimi-K2.5-W4A8": 534_000_000_000,
    "amd/Kimi-K2.6-MXFP4": 559_000_000_000,
    "lightseekorg/kimi-k2.5-eagle3": 6_000_000_000,
}


def _missing(facts: Facts, checkpoint: RecipeCheckpoint) -> tuple[int, int, str]:
    """Return a Hub checkpoint's bytes in total and not in the cache, and "complete" if no file is missing.

    Without a list of the repository's files, the bytes in the cache are compared with the published size.
    """
    snapshot = Repository(checkpoint.repo, checkpoint.revision, facts.probe.cache()).here()
    if snapshot is None or snapshot.sizes is None:
        total = PUBLISHED_SIZES.get(checkpoint.repo, 0)
        return total, max(total - sum(snapshot.present.values() if snapshot else ()), 0), ""
    total, missing = sum(snapshot.sizes.values()), snapshot.missing
    if missing:
        return total, max(sum(missing.values()), 1), ""
    return total, 0, "complete, verified" if snapshot.verified else "complete"


def checkpoints(facts: Facts) -> list[Finding]:
    """Check the target and the draft."""
    named = zip(("model", "draft"), facts.recipe.checkpoints, strict=False)  # not every recipe has a draft
    return [_checkpoint(facts, name, checkpoint) for name, checkpoint in named]


def _checkpoint(facts: Facts, name: str, checkpoint: RecipeCheckpoint) -> Finding:
    if checkpoint.repo.startswith("builtin:"):
        return ok(f"{checkpoint.repo} comes with the package", name)
    if not checkpoint.on_hub:
        folder = Path(checkpoint.repo).expanduser()
        if (folder / "config.json").is_file():
            return ok(str(folder), name)
        return fail(f"no config.json in {folder}", "correct the recipe's path", name)
    total, missing, complete = _missing(facts, checkpoint)
    what = f"{checkpoint.repo} at {checkpoint.revision[:12]}: "
    if complete:
        return ok(f"{what}{decimal(total)}, {complete}", name)
    state = what + (f"{decimal(missing)} of {decimal(total)} missing" if total else "not here")
    command = f"kimi-w4a8 fetch --recipe {facts.recipe.name}"
    if facts.probe.offline():
        return fail(f"{state}, and HF_HUB_OFFLINE forbids downloads", f"unset it, then {command}", name)
    if problem := facts.hub_problem(checkpoint.repo, checkpoint.revision):
        return fail(f"{state}; {problem.what}", problem.remedy or command, name)
    return warn(f"{state}; the Hub has it", command, name)


def memory(facts: Facts) -> Finding:
    """Check the host memory for a load by mmap: ROCm makes each page that it copies from private, and keeps it."""
    weights = _missing(facts, facts.recipe.model)[0] if facts.recipe.model.on_hub else 0
    found = re.search(r"^MemAvailable: +(\d+) kB", facts.probe.read("proc/meminfo") or "", re.MULTILINE)
    if not weights or not found:
        return skip("the size of the weights or the free memory is not known")
    free, limit = int(found[1]) << 10, facts.probe.read("sys/fs/cgroup/memory.max") or "max"
    free = min(free, int(limit)) if limit.isdigit() else free
    state = f"{decimal(free)} free, {decimal(weights)} of weights"
    if facts.args.get("weight-loader-disable-mmap") or free >= weights:
        return ok(state)
    what = f"{state}: while ROCm loads by mmap, host memory can grow by the weights (https://github.com/alibaba/rtp-llm/pull/1218)"
    return warn(what, "--set weight-loader-disable-mmap=true, which reads each file into memory and frees it")


def disk(facts: Facts) -> Finding:
    """Check the space in the cache for the missing files of all checkpoints."""
    wanted = [_missing(facts, checkpoint)[1] for checkpoint in facts.recipe.checkpoints if checkpoint.on_hub]
    if not wanted:
        return skip("no checkpoint is downloaded for this recipe")
    cache = facts.probe.cache()
    free = facts.probe.space(cache)[1]
    if error := shortage(cache, sum(wanted), "set HF_HOME to a larger disk (a local NVMe loads fastest)", free):
        return fail(f"{error.what} in {cache}", error.remedy)
    return ok(f"{decimal(free)} free in {cache}, {decimal(sum(wanted))} to fetch")

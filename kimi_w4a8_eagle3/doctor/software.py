"""Checks of the software: Python, the tested packages, this package's plugin, the patches."""

from __future__ import annotations

from ..base.errors import KimiError
from ..base.finding import Finding, Severity
from ..base.releases import SGLANG_PINNED
from ..machine.aiter_patches import State
from ..machine.hardware import base_problem, read_base
from ..recipe.on_machine import concerning
from .facts import Facts
from .result import fail, ok, skip, warn

PLUGIN = "kimi_w4a8_eagle3"
PATCHES = {
    State.APPLIED: (Severity.OK, ""),
    State.NOT_INSTALLED: (Severity.SKIP, ""),
    State.NOT_APPLIED: (Severity.WARN, "kimi-w4a8 patch"),
    State.STALE_BUILD: (Severity.FAIL, "run `kimi-w4a8 patch`; AITER compiles these modules again"),
    State.DOES_NOT_FIT: (Severity.WARN, "serve without it, or with the AITER of the image"),
}


def sglang(facts: Facts) -> Finding:
    """Check that SGLang is installed; `known_faults` checks its release."""
    remedy = f"use the image or `make venv`; the pinned release is {SGLANG_PINNED}"
    version = facts.probe.package("sglang")
    return ok(version) if version else fail("not installed", remedy)


def base(facts: Facts) -> Finding:
    """Check the record of the base image: of this image, pinned, and with a reason for each of its variables."""
    if problem := base_problem(facts.installed, facts.probe.root):
        return warn(problem.what, problem.remedy)
    record = read_base(facts.probe.root)
    found = ", ".join([record.reference, *(f"{name} {commit[:10]}" for name, commit in record.commits.items())])
    if record.unclassified:
        unknown = f"{found}; not in launch/base-image.toml: {', '.join(record.unclassified)}"
        return warn(unknown, "find out what each does, then add it there with its reason")
    if record.digest is None:
        return warn(f"{found}; its tag can move", "launch/pin-base.sh, then build the image again")
    return ok(f"{found}, {record.digest[:19]}")


def known_faults(facts: Facts) -> list[Finding]:
    """Check the known faults of the installed packages; `kimi-w4a8 serve` warns of those of the recipe alone."""
    arch = next(iter([device.arch for device in facts.machine.devices] or facts.recipe.hardware.arch), None)
    results = []
    environment = {**facts.probe.environment(), **facts.recipe.environment}
    for fault in concerning(facts.args, environment, arch, facts.installed):
        name, refused = f"fault {fault.id}", fault.severity is Severity.FAIL
        if fault.id in facts.recipe.options.accept_faults:
            results.append(ok(f"accepted: {fault.sentence}", name))
        elif fault.severity is Severity.NOTE:
            results.append(ok(f"{fault.sentence}; {fault.remedy}", name))
        elif refused or fault.installed or fault.env:
            results.append((fail if refused else warn)(fault.sentence, fault.remedy, name))
    return results or [ok("none on this machine with this recipe")]


def torch(facts: Facts) -> Finding:
    """Check that torch is built for the recipe's hardware."""
    version, build = facts.probe.package("torch"), facts.probe.torch_build()
    if version is None or build is None:
        return fail("not installed", "use the image or `make venv`")
    found = version if version.endswith(f"+{build}") else f"{version} ({build})"
    if facts.gpus and not build.startswith("hip"):
        return fail(f"{found}: not built for ROCm", "use the ROCm SGLang image (see the Dockerfile)")
    return ok(found)


def kernels(facts: Facts) -> list[Finding]:
    """Check AITER and this package's code objects, which hold the kernels of the recipes for GPUs."""
    if not facts.gpus:
        return [skip("not needed on a CPU", name) for name in ("aiter", "kernels")]
    aiter = facts.probe.package("amd-aiter", "aiter")
    results = [
        ok(f"{aiter}; page offsets: {facts.probe.aiter_regime().value}", "aiter")
        if aiter
        else fail("not installed", "use the ROCm SGLang image, which carries AITER built for its ROCm", "aiter")
    ]
    try:
        folder, count = facts.probe.code_objects()
        results.append(ok(f"{count} code objects in {folder}", "kernels"))
    except KimiError as error:
        results.append(fail(error.what, error.remedy, "kernels"))
    return results


def plugin(facts: Facts) -> Finding:
    """Check that SGLang finds this package's plugin by its entry point."""
    if PLUGIN in facts.probe.plugins():
        return ok(f"{PLUGIN} is registered with SGLang")
    return fail("SGLang's plugin list lacks this package", "install the package with pip, not by PYTHONPATH")


def patches(facts: Facts) -> list[Finding]:
    return [
        Finding(f"{patch.state.value}: {patch.detail}", severity, f"patch {patch.name}", remedy=remedy)
        for patch in facts.probe.patches()
        for severity, remedy in [PATCHES[patch.state]]
    ]

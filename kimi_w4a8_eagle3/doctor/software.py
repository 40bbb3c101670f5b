"""Checks of the software: Python, the tested packages, this package's plugin, the patches."""

from __future__ import annotations

from packaging.version import Version

from ..base.errors import KimiError
from ..patching.patcher import SATISFIED, Status
from ..patching.patches import TRIED
from ..recipe.known_faults import concerning
from .facts import Facts
from .result import Result, fail, ok, skip, warn

PYTHON_MINIMUM = Version("3.10")
SGLANG_PINNED = "0.5.20"  # a test compares it with requirements/constraints.txt and the Dockerfile
SGLANG_NEWEST = "0.5.23"  # the second supported release; the plugin's tests run on both
VLLM_READ = "0.19.0"
ROUTER_READ = "0.3.2"
PLUGIN = "kimi_w4a8_eagle3"


def python(facts: Facts) -> Result:
    """Check the Python version."""
    text = facts.probe.python_version()
    if Version(text) < PYTHON_MINIMUM:
        return fail("python", text, f"use Python {PYTHON_MINIMUM} or later")
    return ok("python", text)


def sglang(facts: Facts) -> Result:
    """Check that SGLang is installed; `known_faults` checks its release."""
    if facts.needs.engine != "sglang":
        return skip("sglang", f"the recipe serves with {facts.needs.engine}")
    version = facts.probe.package("sglang")
    if version is None:
        return fail("sglang", "not installed", f"use the image or `make venv`; the pinned release is {SGLANG_PINNED}")
    return ok("sglang", version)


def known_faults(facts: Facts) -> list[Result]:
    """Check the known faults of the installed packages; `kimi-w4a8 serve` warns of those of the recipe alone."""
    needs, arch = facts.needs, next(iter(facts.archs or facts.needs.arch), None)
    results = []
    for fault in concerning(needs.args, needs.environment, arch, facts.installed):
        name, refused = f"fault {fault.id}", fault.verdict == "refuse"
        if fault.id in needs.accepted_faults:
            results.append(ok(name, f"accepted: {fault.sentence}"))
        elif refused or fault.installed:
            results.append((fail if refused else warn)(name, fault.sentence, fault.remedy))
    return results or [ok("known_faults", "none on this machine with this recipe")]


def vllm(facts: Facts) -> Result:
    """Check that vLLM is installed; the recipe's image names the build."""
    if facts.needs.engine != "vllm":
        return skip("vllm", f"the recipe serves with {facts.needs.engine}")
    version = facts.probe.package("vllm")
    if version is None:
        command = f"kimi-w4a8 serve --recipe {facts.needs.recipe} --dry-run --docker"
        return fail("vllm", "not installed", f"run it in the recipe's image: `{command}`")
    return ok("vllm", f"{version} (options were checked with {VLLM_READ})")


def torch(facts: Facts) -> Result:
    """Check that torch is built for the recipe's hardware."""
    version, build = facts.probe.package("torch"), facts.probe.torch_build()
    if version is None or build is None:
        return fail("torch", "not installed", "use the image or `make venv`")
    found = version if version.endswith(f"+{build}") else f"{version} ({build})"
    if facts.needs.on_gpu and not build.startswith("hip"):
        return fail("torch", f"{found}: not built for ROCm", "use the ROCm SGLang image (see the Dockerfile)")
    return ok("torch", found)


def kernels(facts: Facts) -> list[Result]:
    """Check AITER and this package's code objects, which hold the kernels of SGLang's GPU recipes."""
    if facts.needs.engine != "sglang":
        return [skip("aiter", "comes with vLLM's image"), skip("kernels", "not used by vLLM")]
    if not facts.needs.on_gpu:
        return [skip("aiter", "not needed on a CPU"), skip("kernels", "not needed on a CPU")]
    aiter = facts.probe.package("amd-aiter", "aiter")
    results = [
        ok("aiter", f"{aiter}; page offsets: {facts.probe.aiter_regime().value}")
        if aiter
        else fail("aiter", "not installed", "use the ROCm SGLang image, which carries AITER built for its ROCm")
    ]
    try:
        folder, count = facts.probe.code_objects()
        results.append(ok("kernels", f"{count} code objects in {folder}"))
    except KimiError as error:
        results.append(fail("kernels", error.what, error.remedy))
    return results


def plugin(facts: Facts) -> Result:
    """Check that SGLang finds this package's plugin by its entry point."""
    if facts.needs.engine != "sglang":
        return skip("plugin", "only for SGLang")
    if PLUGIN in facts.probe.plugins():
        return ok("plugin", f"{PLUGIN} is registered with SGLang")
    return fail("plugin", "SGLang's plugin list lacks this package", "install the package with pip, not by PYTHONPATH")


def router(facts: Facts) -> Result:
    """Check that the router accepts this package's options; some images build a router of their own."""
    missing = facts.probe.router_lacks()
    if missing is None:
        return skip("router", "sglang-router is not installed; a single engine does not need it")
    version = facts.probe.package("sglang-router")
    if missing:
        remedy = f"serve without --replicas, or route with sglang-router {ROUTER_READ}"
        return fail("router", f"{version} does not know {', '.join(missing)}", remedy)
    return ok("router", f"{version} (options were read from {ROUTER_READ})")


def patches(facts: Facts) -> list[Result]:
    """Check the state of every patch."""
    if facts.needs.engine != "sglang":
        return [skip("patches", "only for SGLang's kernels")]
    if not facts.needs.on_gpu:
        return [skip("patches", "only for GPU kernels")]

    results = []
    for report in facts.probe.patches():
        name, found = f"patch {report.id}", f"{report.status.value}: {report.detail}"
        if report.status in SATISFIED:
            results.append(ok(name, found))
        elif report.status is Status.NOT_INSTALLED:
            results.append(skip(name, found))
        elif report.status is Status.NOT_APPLIED:
            results.append(warn(name, found, f"kimi-w4a8 patch apply --id {report.id}"))
        elif report.status is Status.STALE_BUILD:
            results.append(fail(name, found, "run `kimi-w4a8 patch apply --remove-stale`; AITER compiles it again"))
        else:
            results.append(
                warn(name, found, f"tested on {TRIED}: install one of these releases, or serve without the patch")
            )
    return results

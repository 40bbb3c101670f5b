"""Optional packages of the tests. A test module that imports a missing one is skipped, and fails in CI."""

from __future__ import annotations

# Import name -> extra of the package that brings it. torch and the extra `dev` are what the suite itself stands on.
PARTS = {
    "compressed_tensors": "quantize",
    "flydsl": "kernels",
    "jinja2": "bench",
    "lm_eval": "eval",
    "PIL": "serve",
    "matplotlib": "bench",
    "pybase64": "serve",
    "quark": "quantize",
    "scipy": "eval",
    "smg": "smg",
    "sglang": "serve",
    "triton": "serve",
    "ziglang": "kernels",
}
PROGRAMS = ("g++", "hadolint", "kubectl", "prometheus", "promtool", "systemd-analyze")


def missing_part(error: BaseException | None) -> str | None:
    """Return the reason to skip a test module that lacks only optional parts."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.partition(".")[0]
            if name in PARTS:
                return f"{name} is not installed (extra `{PARTS[name]}`)"
        error = error.__cause__
    return None

"""One message for missing optional packages: what is not installed, and the command that installs it.

Each extra is read from the metadata of this installation, which pip makes from pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .errors import KimiError
from .next_step import pip_install

PACKAGE = "kimi-w4a8-eagle3"
# Modules whose name differs from their distribution's.
_DISTRIBUTIONS = {"markupsafe": "jinja2", "quark": "amd-quark"}
# These depend on the GPU and on each other, so they come from an image or from `make venv`.
_IN_NO_EXTRA = ("sglang", "transformers", "triton")


def require(*modules: str) -> None:
    """Raise KimiError when an optional module is not installed. Imports nothing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise not_installed(missing)


def failed_import(error: ModuleNotFoundError) -> KimiError | None:
    """Return the message for an import that failed; None when the module is not optional, which is a bug."""
    module = (error.name or "").partition(".")[0]
    known = {*_IN_NO_EXTRA, *_DISTRIBUTIONS}.union(*_extras().values())
    return not_installed([module]) if {module, distribution(module)} & known else None


def not_installed(modules: Sequence[str]) -> KimiError:
    """Return the message that names the missing modules and the command that installs them."""
    names = [distribution(module) for module in modules]
    what = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"
    if engine := [name for name in names if name in _IN_NO_EXTRA]:
        return KimiError(
            what,
            expected=f"an environment with {', '.join(engine)}, which no extra of {PACKAGE} installs",
            remedy="in a checkout of this package: `make venv`, then .venv/bin/kimi-w4a8; "
            "for GPUs: `docker build -t kimi-w4a8-eagle3 .`, then launch/docker-run.sh",
        )
    extras = _covering(set(names))
    chosen = f"'.[{','.join(extras)}]'"
    return KimiError(
        what,
        expected=f"the extra{'s' * (len(extras) > 1)} {', '.join(f'`{extra}`' for extra in extras)}",
        remedy=f"in a checkout of this package: {pip_install(chosen)}",
    )


def distribution(module: str) -> str:
    """Return the name of the distribution that installs a top-level module."""
    return _DISTRIBUTIONS.get(module, canonicalize_name(module))


def _covering(wanted: set[str]) -> list[str]:
    """Return few extras that together install the distributions."""
    extras, chosen, left = _extras(), list[str](), wanted
    while left & set().union(*extras.values()):
        chosen.append(max(extras, key=lambda extra: len(extras[extra] & left)))
        left = left - extras[chosen[-1]]
    return chosen


def _extras() -> dict[str, set[str]]:
    """Return the distributions of each extra, in the order of pyproject.toml."""
    asked = [one for one in map(Requirement, metadata.requires(PACKAGE) or []) if one.name != PACKAGE]  # not `all`
    names = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    return {
        extra: {canonicalize_name(one.name) for one in asked if one.marker and one.marker.evaluate({"extra": extra})}
        for extra in names
    }

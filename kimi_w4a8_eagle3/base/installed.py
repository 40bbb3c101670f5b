"""Parts of this installation, found without importing them: optional packages, versions, folders, the laptop's engine.

Each extra is read from the metadata of this installation, which pip makes from pyproject.toml. The folders that an
operator reads (`launch/`, ...) live at the top of the repository, and `requirements/wheel.py` copies them to
`kimi_w4a8_eagle3/_operator/` when a wheel is built. The distribution kimi-w4a8-laptop serves the built-in model on a
CPU. A serving image does not contain it, so the package asks for its entry points and never imports it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .errors import KimiError
from .next_step import pip_install

PACKAGE = "kimi-w4a8-eagle3"
# Modules whose name differs from their distribution's.
_DISTRIBUTIONS = {"markupsafe": "jinja2", "quark": "amd-quark"}
# These depend on the GPU and on each other, so they come from an image or from `make venv`.
_IN_NO_EXTRA = ("sglang", "transformers", "triton")
PackageName = Literal["aiter", "rocm", "sglang", "torch"]
_PROGRAMS: dict[PackageName, tuple[str, ...]] = {
    "aiter": ("amd-aiter", "aiter"),
    "sglang": ("sglang",),
    "torch": ("torch",),
}
ROCM = "opt/rocm/.info/version"
_LAPTOP = "kimi_w4a8_eagle3.laptop"  # entry points of kimi-w4a8-laptop
_HERE = Path(__file__).parents[1]


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
        remedy=f"in a checkout of this package: {pip_install('-e', chosen)}",
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


def operator_dir(name: str) -> Path:
    """Return the folder `name` (for example `launch/recipes`) of this installation.

    A checkout wins over a copy in the package, so that an editable install always reads the file being edited.
    """
    candidates = [_HERE.parent / name, _HERE / "_operator" / name]
    if not (_HERE.parent / "pyproject.toml").is_file():
        candidates.reverse()  # site-packages/launch would belong to another package
    for path in candidates:
        if path.is_dir():
            return path
    raise KimiError(
        f"the folder {name} is missing from this installation",
        where=str(_HERE),
        expected="the folder beside the package (checkout) or under _operator/ in it (wheel)",
        remedy="reinstall the package",
    )


def version_of(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_versions(version: Callable[..., str | None] = version_of, rocm: str | None = None) -> dict[str, str]:
    """Return package -> version of the installed programs.

    rocm: text of ROCm's version file, which is read unless given.
    """
    if rocm is None:
        file = Path("/") / ROCM
        rocm = file.read_text().strip() if file.is_file() else ""
    found: dict[str, str | None] = {name: version(*names) for name, names in _PROGRAMS.items()}
    found["rocm"] = rocm.partition("-")[0]  # "7.2.0-42"
    return {name: text for name, text in found.items() if text}


@cache
def laptop_part(part: str) -> Any:
    """Return the object that kimi-w4a8-laptop registers under this name, or None without that distribution."""
    found = next(iter(entry_points(group=_LAPTOP, name=part)), None)
    return None if found is None else found.load()


def require_laptop(part: str, user: str) -> Any:
    """Return a part, which must not be None; raise KimiError without kimi-w4a8-laptop.

    user: the option or file that needs the part.
    """
    found = laptop_part(part)
    if found is None:
        raise KimiError(
            "the package kimi-w4a8-laptop is not installed",
            where=user,
            expected="the built-in model and its engine on a CPU, which images for GPUs do not contain",
            remedy="in a checkout of this package: `make demo`, then .venv/bin/kimi-w4a8; "
            f"or {pip_install('./kimi_w4a8_laptop')}",
        )
    return found


def find_root(package: str) -> Path | None:
    """Return the folder that contains the package's folder (site-packages, or a checkout); None if not installed."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]).resolve().parent if locations else None


def find_version(distributions: tuple[str, ...], root: Path) -> str | None:
    """Return the version that is recorded in `root`; None when nothing is recorded."""
    found = (found for name in distributions for found in metadata.distributions(name=name, path=[str(root)]))
    return next((distribution.version for distribution in found), None)

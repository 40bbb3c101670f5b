"""Known faults of installed packages, and the launches they concern, from `launch/known-faults.toml`.

Conditions on versions and numbers are Python requirement specifiers, such as `>=0.5.16,<0.5.18` or `>4`. Conditions on
the environment hold for the recipe's variables and for those that the engine inherits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import KimiError
from ..base.finding import Finding, Severity
from ..base.nearest import nearest
from ..base.resources import operator_dir
from ..base.toml import tomllib
from ..machine.installed import Package
from .arguments import Args, show
from .schema import ArgValue

_COMPARES = ("<", ">", "=", "!", "~")


def _comparable(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} compares nothing") from None
    return text


Specifier = Annotated[str, AfterValidator(_comparable)]
_One = Annotated[str, AfterValidator(lambda text: _comparable(text) if text[:1] in _COMPARES else text)]
Condition = bool | _One | list[_One]
_COMMIT = re.compile(r"\bg([0-9a-f]{7,40})\b")


class Fault(BaseModel):
    """One fault: its conditions, its effect, its report and its remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    verdict: Literal["refuse", "warn", "note", "set"]
    installed: dict[Package, Specifier] = {}
    tried: dict[Package, list[str]] = {}
    arch: list[str] = []
    args: dict[str, Condition] = {}
    env: dict[str, Condition] = {}
    set: dict[str, ArgValue] = {}
    what: str = Field(min_length=10)
    link: str = Field(pattern="^https://")
    remedy: str = Field(min_length=5)

    @property
    def severity(self) -> Severity:
        return {"refuse": Severity.FAIL, "note": Severity.NOTE}.get(self.verdict, Severity.WARN)

    @property
    def sentence(self) -> str:
        """The fault and its link, as shown to the user."""
        return f"{self.what} ({self.link})"

    def concerns(
        self, args: Mapping[str, ArgValue], env: Mapping[str, str], arch: str | None, installed: Mapping[str, str]
    ) -> bool:
        """True if all conditions hold and, for `set`, an argument differs from its required value."""
        return (
            all(name in installed and _compares(text, installed[name]) for name, text in self.installed.items())
            and not any(_is_one_of(listed, installed.get(name, "")) for name, listed in self.tried.items())
            and (not self.arch or arch in self.arch)
            and all(_holds(condition, args.get(name)) for name, condition in self.args.items())
            and all(_holds(condition, env.get(name)) for name, condition in self.env.items())
            and (not self.set or any(args.get(name) != value for name, value in self.set.items()))
        )


@cache
def known_faults(path: Path | None = None) -> tuple[Fault, ...]:
    """Load the table; raise KimiError for a mistake in it."""
    path = path or operator_dir("launch") / "known-faults.toml"
    try:
        return tuple(Fault(id=name, **entry) for name, entry in tomllib.loads(path.read_text()).items())
    except (tomllib.TOMLDecodeError, ValidationError, TypeError) as error:
        raise KimiError(f"cannot read the table of known faults: {error}", where=str(path)) from None


def concerning(
    args: Mapping[str, ArgValue], env: Mapping[str, str], arch: str | None, installed: Mapping[str, str]
) -> list[Fault]:
    """Return the known faults of a launch on `arch` with the `installed` versions, in the table's order."""
    return [fault for fault in known_faults() if fault.concerns(args, env, arch, installed)]


def apply_faults(faults: Sequence[Fault], args: Args, accepted: Sequence[str], notes: list[Finding]) -> list[Fault]:
    """Set arguments and add warnings; return the faults that refuse. `accepted`: ids that the operator accepts."""
    require_known(accepted)
    refused = []
    for fault in faults:
        if fault.id in accepted:
            notes.append(Finding(f"the known fault {fault.id} is accepted: {fault.sentence}", Severity.OVERRIDE))
        elif fault.set and not set(fault.set) & set(args):
            args.update(fault.set)
            notes += [Finding(f"{show(name, value)}: {fault.sentence}") for name, value in fault.set.items()]
        else:
            refused += [fault] if fault.severity is Severity.FAIL else []
            notes.append(Finding(f"{fault.sentence}; {fault.remedy}", fault.severity))
    return refused


def require_known(accepted: Sequence[str]) -> None:
    """Raise KimiError for an accepted fault that is not in the table."""
    ids = [fault.id for fault in known_faults()]
    if unknown := [fault for fault in accepted if fault not in ids]:
        raise KimiError(
            f"no known fault is called {unknown[0]!r}{nearest(unknown[0], ids)}",
            where="options.accept_faults",
            expected=", ".join(ids),
        )


def _is_one_of(listed: Sequence[str], text: str) -> bool:
    """True if the version is a listed final release, or a build of a listed commit (`0.5.20.dev1+g1234567`)."""
    try:
        version = Version(text)
    except InvalidVersion:
        return False
    commit = _COMMIT.search(version.local or "")
    if commit and any(known.startswith(commit[1]) or commit[1].startswith(known) for known in listed):
        return True
    return not version.is_prerelease and ".".join(map(str, version.release)) in listed


def _holds(condition: bool | str | list[str], value: Any) -> bool:
    if isinstance(condition, list):
        return any(_holds(one, value) for one in condition)
    given = value is not None and value is not False
    if isinstance(condition, bool) or not given:
        return condition is given
    return _compares(condition, str(value)) if condition[:1] in _COMPARES else str(value) == condition


def _compares(specifier: str, text: str) -> bool:
    """True if the version or number satisfies the specifier; an unreadable version satisfies none."""
    try:
        return SpecifierSet(specifier).contains(Version(text), prereleases=True)
    except InvalidVersion:
        return False

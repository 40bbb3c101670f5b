"""Base of the container image: the record that the build wrote, and what this package does with its environment.

`launch/docker/record_base.py` writes base.json before anything is added to the base. `launch/base-image.toml`
classifies every environment variable of the base.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import KimiError
from ..base.resources import operator_dir
from ..base.toml import tomllib

RECORD = "opt/kimi/base.json"
REBUILD = "run this package's image: docker build -t kimi-w4a8-eagle3 ."


class BaseImage(BaseModel):
    """Record of the base; versions and commits are by package name.

    digest: `sha256:...` if the build was pinned. numactl: its version in the base, None if the base lacks it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str
    digest: str | None = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    versions: dict[str, str]
    commits: dict[str, str]
    env: dict[str, str]
    numactl: str | None

    @property
    def unclassified(self) -> list[str]:
        """Variables of the base that launch/base-image.toml does not list."""
        return sorted(set(self.env) - {name for names in classified().values() for name in names})

    def foreign(self, installed: dict[str, str]) -> list[str]:
        """Return the packages whose installed version is not the recorded one: the record is of another image."""
        own = {name: {version, self._with_commit(name, version)} for name, version in self.versions.items()}
        return sorted(name for name, versions in own.items() if name in installed and installed[name] not in versions)

    def with_commits(self, installed: dict[str, str]) -> dict[str, str]:
        """Return the installed versions with the recorded commits, as in `0.5.20+g1234567`, where they name none."""
        return {name: self._with_commit(name, version) for name, version in installed.items()}

    def _with_commit(self, name: str, version: str) -> str:
        return f"{version}+g{self.commits[name]}" if name in self.commits and "+" not in version else version


@cache
def classified() -> dict[str, dict[str, str]]:
    """Return launch/base-image.toml: class (keep, set, unset) -> variable -> reason."""
    path = operator_dir("launch") / "base-image.toml"
    return tomllib.loads(path.read_text())


def read_base(root: Path = Path("/")) -> BaseImage:
    """Read the record below `root`; raise KimiError if there is none or it is damaged."""
    path = root / RECORD
    try:
        return BaseImage.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise KimiError("no record of a base image: this is not this package's image", str(path), "", REBUILD) from None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise KimiError(f"the record of the base image is unreadable: {reason}", str(path), "", REBUILD) from None


def identified(installed: dict[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the installed versions with the commits of the base image, if its record is of this image."""
    return installed if base_problem(installed, root) else read_base(root).with_commits(installed)


def base_problem(installed: dict[str, str], root: Path = Path("/")) -> KimiError | None:
    """Return what is wrong with the record of the base image, None if it describes the `installed` packages."""
    try:
        base = read_base(root)
    except KimiError as error:
        return error
    foreign = base.foreign(installed)
    if not foreign:
        return None
    found = ", ".join(f"{name} {installed[name]}, recorded {base.versions[name]}" for name in foreign)
    return KimiError(f"the record is of another base image: {found}", str(root / RECORD), "", REBUILD)

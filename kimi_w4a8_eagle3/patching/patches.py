"""The manifest of patches: edited files, purpose, and check of each patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..base.errors import KimiError, UsageError
from ..base.nearest import nearest
from ..base.resources import operator_dir
from ..base.toml import tomllib
from .cpp_edits import SmallPagesLoadGlobally
from .edit_state import Edit
from .python_edits import ParameterDefault


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PatchedFile(_Strict):
    """One file of a patch: its possible places below the root, and the edit with its options."""

    any_of: tuple[str, ...] = Field(min_length=1)
    edit: str
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _edit_exists(self) -> PatchedFile:
        self.make_edit()
        return self

    def make_edit(self) -> Edit:
        """Return the edit; raise ValueError for an unknown name or wrong options."""
        try:
            return _EDITS[self.edit](**self.options)
        except KeyError:
            raise ValueError(f"unknown edit {self.edit!r}{nearest(self.edit, _EDITS)}") from None
        except TypeError as error:
            raise ValueError(f"options of edit {self.edit!r}: {error}") from None


class Patch(_Strict):
    """One entry of the manifest."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    package: str  # the import name, which leads to the root
    distributions: tuple[str, ...]  # names under which its version may be recorded
    purpose: str
    check: str
    upstream: str
    gate: str
    built: tuple[str, ...] = ()  # compiled from the patched files; stale when older than they are
    file: tuple[PatchedFile, ...] = Field(min_length=1)


class _Manifest(_Strict):
    patch: tuple[Patch, ...]

    @model_validator(mode="after")
    def _consistent(self) -> _Manifest:
        ids = [patch.id for patch in self.patch]
        paths = [path for patch in self.patch for file in patch.file for path in file.any_of]
        for kind, values in (("id", ids), ("file", paths)):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{kind} used twice: {', '.join(twice)}")
        return self


TRIED = "AITER v0.1.1 to v0.1.20.post1"  # the edits were tried on these files; docs/page-guard.md
_EDITS: dict[str, Any] = {"parameter-default": ParameterDefault, "small-pages-load-globally": SmallPagesLoadGlobally}


def load_manifest(path: Path | None = None) -> list[Patch]:
    """Return all patches of the manifest (default: the installation's own `patches/manifest.toml`)."""
    path = path or operator_dir("patches") / "manifest.toml"
    try:
        return list(_Manifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).patch)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise KimiError("the patch manifest cannot be read", where=f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KimiError(
            f"the patch manifest is wrong: {first['msg']}",
            where=f"{path}, {where}" if where else str(path),
            expected="the keys of kimi_w4a8_eagle3.patching.patches.Patch",
        ) from error


def select(patches: list[Patch], ids: list[str]) -> list[Patch]:
    """Return the patches named by `ids` in the manifest's order, all of them for an empty list."""
    known = [patch.id for patch in patches]
    for name in ids:
        if name not in known:
            raise UsageError(f"no patch is called {name!r}{nearest(name, known)}", expected=", ".join(known))
    return [patch for patch in patches if not ids or patch.id in ids]

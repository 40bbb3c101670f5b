"""Exchange the draft that a recipe names by a link, and go back; each running server follows after SIGHUP."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.supervision.checks import weights_digest

BEFORE = ".before"  # suffix of the link to the draft that was served before


def switch(link: Path, new: Path) -> Path | None:
    """Let `link` point to the draft in `new`; return the draft before, or None for a first one.

    Raises KimiError for a draft whose files are not those that `draft train` wrote, and for a place that is no link.
    """
    try:
        written = json.loads((new / "training.json").read_text())["sha256"]
    except (OSError, ValueError, KeyError) as error:
        what = "this is no draft of `kimi-w4a8 draft train`"
        raise KimiError(what, str(new), "a folder with training.json", "kimi-w4a8 draft train") from error
    if weights_digest(new) != written:
        what = "the draft's files have changed since it was trained"
        raise KimiError(what, str(new), f"sha256 {written}", "train it again, or copy it again")
    return _point(link, new.resolve())


def back(link: Path) -> Path:
    """Let `link` point to the draft before the last switch, and return that draft."""
    before = Path(f"{link.absolute()}{BEFORE}")  # `.` has no name
    if not before.is_symlink() or not before.exists():
        raise KimiError("there is no earlier draft", str(before), "a link that `kimi-w4a8 draft switch` left")
    old = before.resolve()
    _point(link, old)
    return old


def _point(link: Path, folder: Path) -> Path | None:
    if link.exists() and not link.is_symlink():
        remedy = f"move the draft away, and begin with its link: mv {link} {link}-1; ln -s {link.name}-1 {link}"
        raise KimiError("this is no link", str(link), "a link that the recipe's draft.repo names", remedy)
    old = link.resolve() if link.exists() else None
    if old == folder:
        raise KimiError("the link has this draft already", str(link), "another draft")
    link.parent.mkdir(parents=True, exist_ok=True)
    if old is not None:
        _replace(link.with_name(link.name + BEFORE), old)
    _replace(link, folder)
    return old


def _replace(link: Path, folder: Path) -> None:
    """Make or replace a link in one step: a reader finds the old draft or the new one."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder)
    temporary.replace(link)

"""Find the parts of the distribution kimi-w4a8-laptop, which serves the built-in model on a CPU.

A serving image does not contain it. The package never imports it by name but asks for its entry points.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from .errors import KimiError
from .next_step import pip_install

_GROUP = "kimi_w4a8_eagle3.laptop"


@cache
def find(part: str) -> Any:
    """Return the object that the distribution registers under this name, or None without the distribution."""
    found = next(iter(entry_points(group=_GROUP, name=part)), None)
    return None if found is None else found.load()


def require(part: str, user: str) -> Any:
    """Return a part as `find` does; raise KimiError without the distribution. user: the option or file that needs it.

    The part must not be None.
    """
    found = find(part)
    if found is None:
        raise KimiError(
            "the package kimi-w4a8-laptop is not installed",
            where=user,
            expected="the built-in model and its engine on a CPU, which images for GPUs do not contain",
            remedy="in a checkout of this package: `make demo`, then .venv/bin/kimi-w4a8; "
            f"or {pip_install('./kimi_w4a8_laptop')}",
        )
    return found

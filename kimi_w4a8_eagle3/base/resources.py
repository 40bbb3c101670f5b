"""Find the folders that an operator reads (`launch/`, ...) in a checkout and in an installed wheel.

They live at the top of the repository. `requirements/wheel.py` copies them to `kimi_w4a8_eagle3/_operator/` when a
wheel is built.
"""

from __future__ import annotations

from pathlib import Path

from .errors import KimiError

_PACKAGE = Path(__file__).parents[1]


def operator_dir(name: str) -> Path:
    """Return the folder `name` (for example `launch/recipes`) of this installation.

    A checkout wins over a copy in the package, so that an editable install always reads the file being edited.
    """
    candidates = [_PACKAGE.parent / name, _PACKAGE / "_operator" / name]
    if not (_PACKAGE.parent / "pyproject.toml").is_file():
        candidates.reverse()  # site-packages/launch would belong to another package
    for path in candidates:
        if path.is_dir():
            return path
    raise KimiError(
        f"the folder {name} is missing from this installation",
        where=str(_PACKAGE),
        expected="the folder beside the package (checkout) or under _operator/ in it (wheel)",
        remedy="reinstall the package",
    )

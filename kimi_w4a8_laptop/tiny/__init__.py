"""The built-in model: a Kimi-K2.5 architecture of two million weights that solves word problems, and its EAGLE3 draft.

Its checkpoints are real: trained for this package, and quantized by AMD Quark to the format of amd/Kimi-K2.5-W4A8.
docs/virtual-node.md says which commit has the training.
"""

from __future__ import annotations

from pathlib import Path

from kimi_w4a8_eagle3.base.errors import KimiError

WEIGHTS = Path(__file__).parent / "weights"
METRICS = Path(__file__).parent / "metrics.json"
TARGET, TARGET_BF16, DRAFT = "target-w4a8", "target-bf16", "draft"


def target_path() -> Path:
    """Return the folder of the W4A8 target."""
    return _checkpoint(TARGET)


def target_bf16_path() -> Path:
    """Return the folder of the BF16 target from which the W4A8 one was quantized."""
    return _checkpoint(TARGET_BF16)


def draft_path() -> Path:
    """Return the folder of the BF16 EAGLE3 draft."""
    return _checkpoint(DRAFT)


CHECKPOINTS = {"builtin:tiny": target_path, "builtin:tiny-draft": draft_path}  # as recipes name them


def _checkpoint(name: str) -> Path:
    folder = WEIGHTS / name
    if not (folder / "config.json").is_file():
        raise KimiError(f"the built-in checkpoint {name} is missing", str(folder), remedy="reinstall the package")
    return folder

"""Quantized once a session by the real AMD Quark, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.quantizing import quantized, write_card_draft, write_packed_target

from kimi_w4a8_eagle3 import tiny
from kimi_w4a8_eagle3.base import torchvision_ops


@pytest.fixture(scope="session", autouse=True)
def torchvision() -> None:
    """Quark and compressed-tensors import transformers, which imports torchvision."""
    torchvision_ops.declare_missing()


@pytest.fixture(scope="session")
def w4a8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in BF16 target, quantized; its report is `report.json` beside it."""
    folder = tmp_path_factory.mktemp("w4a8")
    return quantized("w4a8-target", tiny.target_bf16_path(), folder / "target", "--report", folder / "report.json")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in target in compressed-tensors INT4."""
    return write_packed_target(tiny.target_bf16_path(), tmp_path_factory.mktemp("packed") / "target")


@pytest.fixture(scope="session")
def card_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_card_draft(tmp_path_factory.mktemp("card") / "draft")


@pytest.fixture(scope="session")
def fp8(card_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized("fp8-draft", card_draft, tmp_path_factory.mktemp("fp8") / "draft", "--no-report")

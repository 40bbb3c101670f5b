"""Quantized once a session by the real AMD Quark, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.quantizing import import_quark, quantized, write_card_draft, write_packed_target

from kimi_w4a8_laptop import tiny


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    import_quark()


@pytest.fixture(scope="session")
def w4a8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in BF16 target, quantized."""
    return quantized("w4a8-target", tiny.target_bf16_path(), tmp_path_factory.mktemp("w4a8") / "target")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in target in compressed-tensors INT4."""
    return write_packed_target(tiny.target_bf16_path(), tmp_path_factory.mktemp("packed") / "target")


@pytest.fixture(scope="session")
def card_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_card_draft(tmp_path_factory.mktemp("card") / "draft")


@pytest.fixture(scope="session")
def fp8(card_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized("fp8-draft", card_draft, tmp_path_factory.mktemp("fp8") / "draft")

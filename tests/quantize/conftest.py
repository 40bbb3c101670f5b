"""Quantized once a session by the real AMD Quark, through the command line."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.quantizing import quantized, write_card_draft, write_packed_target

from kimi_w4a8_eagle3 import tiny
from kimi_w4a8_eagle3.base import torchvision_ops


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Quark, without the ten seconds in which it parses every model of transformers for a decorator that few name."""
    torchvision_ops.declare_missing()  # it imports transformers, which imports torchvision
    parse = ast.parse

    def parse_if_named(source: Any, *more: Any, **options: Any) -> ast.AST:
        scan = sys._getframe(1).f_code.co_name == "_find_decorated_experts_classes"
        return parse("" if scan and "use_experts_implementation" not in source else source, *more, **options)

    with pytest.MonkeyPatch.context() as patch, suppress(ImportError):
        patch.setattr(ast, "parse", parse_if_named)
        import quark.torch  # noqa: F401 - optional: amd-quark


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

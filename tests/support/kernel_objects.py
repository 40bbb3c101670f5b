"""Code objects for tests: compiled once a worker, by `kimi-w4a8 warm`'s own code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import KernelConfig
from kimi_w4a8_eagle3.moe.flydsl.kernels.warm import warm

SMALL = MoeShape(num_experts=6, hidden=1024, inter=256, top_k=3)


def silent(finished: Iterable[Any], count: int) -> Iterable[Any]:
    """Ignore the progress."""
    return finished


def small_kernels() -> list[KernelConfig]:
    """The kernels that serve SMALL."""
    return FlydslBackend().wanted(SMALL)


@pytest.fixture(scope="session")
def small_objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `small_kernels`; do not change it."""
    folder = tmp_path_factory.mktemp("kernels")
    warm(small_kernels(), folder, 1, silent)
    return folder

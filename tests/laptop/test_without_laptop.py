"""Without kimi-w4a8-laptop, as in an image for GPUs, everything but the built-in model works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base import installed
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import laptop_part
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accuracy.accuracy import _recorded_tiny


@pytest.fixture(autouse=True)
def _absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(installed, "_LAPTOP", "nothing.registers.here")
    installed.laptop_part.cache_clear()
    yield
    installed.laptop_part.cache_clear()


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["serve", "tiny"], "builtin:tiny"),
        (["serve", "tiny:plain", "--dry-run"], "builtin:tiny"),
        (["eval", "lossless", "--exact", "--base-url", "http://a", "--reference-url", "http://b"], "--exact"),
    ],
)
def test_the_built_in_model_says_what_to_install(words: list[str], where: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, KimiError) and error.where == where
    assert error.what == "the package kimi-w4a8-laptop is not installed"
    assert "make demo" in error.remedy and "pip install ./kimi_w4a8_laptop" in error.remedy


def test_the_rest_does_without_it() -> None:
    assert laptop_part("starter") is None
    assert _recorded_tiny() == []
    assert CliRunner().invoke(app, ["serve", "eagle3-opt", "--dry-run"]).exit_code == 0

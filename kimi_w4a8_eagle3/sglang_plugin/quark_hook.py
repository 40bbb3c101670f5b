"""Give a W4A8 Quark checkpoint our QuarkConfig subclass, and leave every other checkpoint to SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..quark.config import is_w4a8_two_stage

TARGET = "sglang.srt.layers.quantization.quark.quark.QuarkConfig.from_config"


def from_config(original: Callable[..., Any], cls: type, config: dict[str, Any]) -> Any:
    """AROUND hook of `QuarkConfig.from_config`: construct our subclass when the format is W4A8."""
    if is_w4a8_two_stage(config):
        # SGLang's import order: its quantization package calls this while it loads
        from .quark_config import W4A8QuarkConfig

        cls = W4A8QuarkConfig
    return original(cls, config)

"""Stage 1 and 2 that write their exact sums in place of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_w4a8_eagle3.moe.flydsl.configs import Stage1Config, Stage2Config


@dataclass(frozen=True)
class Stage1Sums(Stage1Config):
    """Writes int32 [slots, 2 * inter], the sums of gate and of up."""


@dataclass(frozen=True)
class Stage2Sums(Stage2Config):
    """Writes float32 [slots, columns], the sums before they are scaled."""


def sums_of(config: Any) -> Any:
    """Return the configuration of the kernel that writes the sums of `config`."""
    return (Stage1Sums if isinstance(config, Stage1Config) else Stage2Sums)(**vars(config))

"""Timing of the two stages of a backend that has tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeBackend, MoeShape

from .tile_search import MeasureTile, Space, gpu_timer


@dataclass(frozen=True)
class Stopwatch:
    """Candidate tiles of a backend for one shape, and how to time them. chosen: the tiles that serve a batch."""

    space: Space
    measure: MeasureTile
    chosen: Callable[[int], Any]


def stopwatch(backend: MoeBackend, shape: MoeShape, arch: str, device: torch.device) -> Stopwatch:
    """Return the stopwatch of a backend with tiles; raise KimiError for a backend without."""
    if backend.name == "triton":
        from kimi_w4a8_eagle3.moe.triton.backend import TritonBackend  # optional: triton

        from .triton_tiles import triton_measure, triton_space  # optional: triton

        assert isinstance(backend, TritonBackend)
        measure = triton_measure(shape, arch, device, gpu_timer)
        return Stopwatch(triton_space(shape), measure, partial(backend.tiles_for, shape, arch=arch))
    if backend.name == "flydsl":
        from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend  # optional: flydsl

        from .flydsl_tiles import flydsl_measure, flydsl_space  # optional: flydsl

        assert isinstance(backend, FlydslBackend)
        measure = flydsl_measure(shape, backend, device, gpu_timer)
        return Stopwatch(flydsl_space(shape), measure, partial(backend.tiles_for, shape))
    raise KimiError(f"the {backend.name} backend has no tiles to measure", where="the chosen MoE backend")

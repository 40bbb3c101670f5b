"""Emulate gfx942's `--kv-cache-dtype fp8_e4m3` on a CPU: KV is rounded to e4m3fnuz when it is written.

SGLang uses e4m3fn on a CPU, and refuses it for MLA. gfx942 has another format of the same width: half the range (240
against 448), twice the resolution near zero, and a cast of 248 or more gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TARGET = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"


def configure_kv_cache_dtype(original: Callable[..., tuple[Any, torch.dtype]], **args: Any) -> tuple[Any, torch.dtype]:
    """AROUND hook of SGLang's choice: return its name and the dtype of the pool."""
    name, dtype = original(**args)
    return name, torch.float8_e4m3fnuz if dtype is torch.float8_e4m3fn else dtype

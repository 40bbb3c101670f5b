"""Disable NCCL on a CPU: a CUDA build of torch ships the library, and SGLang would start it without a GPU."""

from __future__ import annotations

from typing import NoReturn

TARGET = "sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library"


def find_nccl_library() -> NoReturn:
    """REPLACE hook: raise as with a CPU build of torch, so that ranks communicate through gloo alone."""
    raise ValueError("an engine on a CPU has no NCCL")

"""Operators of an engine without a GPU: the virtual node's, or those of the CPU path."""

from __future__ import annotations

from . import cpu, virtual


def install() -> bool:
    """Install them before the first import of SGLang; True when they are ours."""
    return virtual.install() if virtual.wanted() else cpu.install()

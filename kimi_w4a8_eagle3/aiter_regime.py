"""How the installed AITER treats a page offset beyond int32: abort, silently wrong, or 64 bits.

The history of its batch-prefill FMHA, read from AITER's commits and release tags: offsets were 32-bit and overflowed
silently until 57cc2291 (2026-03-06) brought asserts that abort the server; 48b0fb59 (2026-04-08) removed the asserts
again; 2b042dba (2026-04-24), shipped in 0.1.13, chooses 64-bit loads when the cache is large. No release has the
asserts, only builds between those commits: the article's AITER (511df6a, b5757d6) is one.
"""

from __future__ import annotations

import re
from enum import Enum

from packaging.version import InvalidVersion, Version


class Regime(Enum):
    """What happens when a page offset exceeds int32."""

    ABORT = "abort"
    SILENT = "silently wrong"
    FIXED64 = "fixed (64-bit offsets)"
    UNKNOWN = "unknown (treated as unsafe)"

    @property
    def wide_offsets(self) -> bool:
        """True only where 64-bit offsets are known to be in place."""
        return self is Regime.FIXED64


FIRST_FIXED = Version("0.1.13")
KNOWN_COMMITS = {"511df6a": Regime.ABORT, "b5757d6": Regime.ABORT}
# Names in ck_tile's own sources that tell the regimes apart.
ASSERT_TEXT = "offset overflow: exceed int32"
WIDE_LOAD_NAME = "kUseGlobalLoad"


def detect_regime(version: str | None, kernel_source: str | None = None, patch_verified: bool = False) -> Regime:
    """The regime of an AITER installation.

    version: its package version, with a local part such as `+gb5757d6` if there is one. kernel_source: the text of the
    installed `fmha_batch_prefill_kernel.hpp` and its pipeline header, which outweighs the version. patch_verified:
    this package's 64-bit patch is applied and verified. Whatever cannot be told is UNKNOWN.
    """
    if patch_verified:
        return Regime.FIXED64
    if kernel_source is not None:
        return _regime_of_source(kernel_source)
    if version is None:
        return Regime.UNKNOWN
    for commit in re.findall(r"\bg?([0-9a-f]{7,40})\b", version.partition("+")[2]):
        if commit[:7] in KNOWN_COMMITS:
            return KNOWN_COMMITS[commit[:7]]
    return _regime_of_release(version)


def _regime_of_source(text: str) -> Regime:
    if WIDE_LOAD_NAME in text:
        return Regime.FIXED64
    if ASSERT_TEXT in text:
        return Regime.ABORT
    return Regime.SILENT


def _regime_of_release(version: str) -> Regime:
    """Only final releases can be placed: a development build's number does not say which commit it is."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return Regime.UNKNOWN
    if parsed.is_prerelease or (parsed.local and not parsed.local.startswith("rocm")):
        return Regime.UNKNOWN
    return Regime.FIXED64 if parsed >= FIRST_FIXED else Regime.SILENT

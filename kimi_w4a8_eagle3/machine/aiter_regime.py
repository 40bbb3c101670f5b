"""Behaviour of the installed AITER for a page offset beyond int32: abort, silently wrong, or 64 bits.

The history of its batch-prefill FMHA, read from AITER's commits and release tags: offsets were 32-bit and overflowed
silently until 57cc2291 (2026-03-06) added asserts that abort the server. 48b0fb59 (2026-04-08) removed the asserts
again. 2b042dba (2026-04-24), shipped in 0.1.13, uses 64-bit loads when the cache is large. No release has the asserts,
only builds between those commits, such as the article's AITER (511df6a, b5757d6).
"""

from __future__ import annotations

import re
from enum import Enum

from packaging.version import InvalidVersion, Version

from ..patching.locate import find_root, find_version
from ..patching.page_offset import page_offset_regime


class Regime(Enum):
    """Effect of a page offset that exceeds int32."""

    ABORT = "abort"
    SILENT = "silently wrong"
    FIXED64 = "fixed (64-bit offsets)"
    UNKNOWN = "unknown (treated as unsafe)"

    @property
    def wide_offsets(self) -> bool:
        """True only where AITER is known to use 64-bit offsets."""
        return self is Regime.FIXED64


FIRST_FIXED = Version("0.1.13")
KNOWN_COMMITS = {"511df6a": Regime.ABORT, "b5757d6": Regime.ABORT}
DISTRIBUTIONS = ("amd-aiter", "aiter")


def installed_regime() -> Regime:
    """Return the regime of the installed AITER, by its headers or else its version, without importing it."""
    root = find_root("aiter")
    return detect_regime(find_version(DISTRIBUTIONS, root), page_offset_regime(root)) if root else Regime.UNKNOWN


def detect_regime(version: str | None, headers: str | None = None) -> Regime:
    """Return the regime of an AITER installation, UNKNOWN when it cannot be determined.

    version: its package version, with a local part such as `+gb5757d6` if there is one.
    headers: behaviour of the installed ck_tile headers, `silent` or `fixed` (patches included), which takes precedence.
    """
    if headers is not None:
        return {"silent": Regime.SILENT, "fixed": Regime.FIXED64}.get(headers, Regime.UNKNOWN)
    version = version or ""
    for commit in re.findall(r"\bg?([0-9a-f]{7,40})\b", version.partition("+")[2]):
        if commit[:7] in KNOWN_COMMITS:
            return KNOWN_COMMITS[commit[:7]]
    return _regime_of_release(version)


def _regime_of_release(version: str) -> Regime:
    """Return the regime of a final release; the number of a development build does not identify its commit."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return Regime.UNKNOWN
    if parsed.is_prerelease or (parsed.local and not parsed.local.startswith("rocm")):
        return Regime.UNKNOWN
    return Regime.FIXED64 if parsed >= FIRST_FIXED else Regime.SILENT

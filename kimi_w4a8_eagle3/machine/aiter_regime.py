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

from ..patching.locate import find_root, find_version
from ..patching.page_offset import page_offset_regime


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
DISTRIBUTIONS = ("amd-aiter", "aiter")


def installed_regime() -> Regime:
    """The regime of the AITER on this machine: by its headers, else by its version. AITER itself is not imported."""
    root = find_root("aiter")
    if root is None:
        return Regime.UNKNOWN
    return detect_regime(find_version(DISTRIBUTIONS, root), page_offset_regime(root))


def detect_regime(version: str | None, headers: str | None = None) -> Regime:
    """The regime of an AITER installation.

    version: its package version, with a local part such as `+gb5757d6` if there is one. headers: what the installed
    ck_tile headers do, `silent` or `fixed` (patches included); it outweighs the version. Whatever cannot be
    told is UNKNOWN.
    """
    if headers is not None:
        return {"silent": Regime.SILENT, "fixed": Regime.FIXED64}.get(headers, Regime.UNKNOWN)
    if version is None:
        return Regime.UNKNOWN
    for commit in re.findall(r"\bg?([0-9a-f]{7,40})\b", version.partition("+")[2]):
        if commit[:7] in KNOWN_COMMITS:
            return KNOWN_COMMITS[commit[:7]]
    return _regime_of_release(version)


def _regime_of_release(version: str) -> Regime:
    """Only final releases can be placed: a development build's number does not say which commit it is."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return Regime.UNKNOWN
    if parsed.is_prerelease or (parsed.local and not parsed.local.startswith("rocm")):
        return Regime.UNKNOWN
    return Regime.FIXED64 if parsed >= FIRST_FIXED else Regime.SILENT

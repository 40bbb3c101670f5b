"""Behaviour of the installed AITER for a page offset beyond int32: abort, silently wrong, or 64 bits.

The history of its batch-prefill FMHA, read from AITER's commits and release tags: offsets were 32-bit and overflowed
silently until 57cc2291 (2026-03-06) added asserts that abort the server. 48b0fb59 (2026-04-08) removed the asserts
again. 2b042dba (2026-04-24), shipped in 0.1.13, uses 64-bit loads when the cache is large. No release has the asserts,
only builds between those commits, such as the article's AITER (511df6a, b5757d6).
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..base.installed import find_root, find_version


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
_CHOICE_HEADER = "example/ck_tile/01_fmha/fmha_fwd.hpp"
_PIPELINE_HEADER = "include/ck_tile/ops/fmha/pipeline/block_fmha_batch_prefill_pipeline_qr_ks_vs_async.hpp"
_CHOICE, _WIDE_LOAD = b"fmha_batch_prefill_select_kv_load_mode", b"GLOBAL_LOAD_LDS"
_CHOICE_FUNCTION = re.compile(rb"\b" + _CHOICE + rb"\(([^()]*)\)\s*\{(.*?)^\}", re.DOTALL | re.MULTILINE)


def installed_regime() -> Regime:
    """Return the regime of the installed AITER, by its headers or else its version, without importing it."""
    root = find_root("aiter")
    if root is None:
        return Regime.UNKNOWN
    return header_regime(root) or detect_regime(find_version(DISTRIBUTIONS, root))


def header_regime(root: Path) -> Regime | None:
    """Return the regime of the ck_tile headers below `root`, the folder that contains `aiter`; None without headers.

    A tree that can load through 64-bit addresses has one function that chooses the load path by the size of a page.
    """
    trees = (root / meta / "3rdparty/composable_kernel" for meta in ("", "aiter_meta"))
    tree = next((tree for tree in trees if (tree / _CHOICE_HEADER).is_file()), None)
    if tree is None:
        return None
    source = (tree / _CHOICE_HEADER).read_bytes()
    if _CHOICE not in source:
        return Regime.SILENT
    found, pipeline = _CHOICE_FUNCTION.findall(source), tree / _PIPELINE_HEADER
    if len(found) != 1 or not pipeline.is_file():
        return Regime.UNKNOWN
    parameters, body = found[0]
    chooses_by_page = b"page_block_size" in parameters and b"kN0" in parameters and _WIDE_LOAD in body
    return Regime.FIXED64 if chooses_by_page and _WIDE_LOAD in pipeline.read_bytes() else Regime.UNKNOWN


def detect_regime(version: str | None) -> Regime:
    """Return the regime of an AITER of this version, UNKNOWN when it cannot be determined.

    version: its package version, with a local part such as `+gb5757d6` if there is one.
    """
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

"""Edit of ck_tile's batch-prefill FMHA, whose page offsets outgrow 32 bits.

A page smaller than one K/V tile cannot have a buffer descriptor of its own, so the kernel puts the whole offset `page *
page stride` into the 32-bit offset register of a buffer load. Computing that product in 64 bits changes nothing,
because the register truncates it again. Newer trees have a second load path with 64-bit addresses and a function that
selects the path. The edit makes it select the second path for every small page.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpp import functions, texts
from .edit_state import State

SELECTOR = "fmha_batch_prefill_select_kv_load_mode"
_CODEC = ("utf-8", "surrogateescape")
_MODE = "BlockAttentionKVCacheLoadModeEnum"


@dataclass(frozen=True)
class SmallPagesLoadGlobally:
    """In `fmha_fwd.hpp`: pages smaller than a K/V tile always take the load path with 64-bit addresses."""

    def inspect(self, source: bytes) -> tuple[State, str]:
        """Return PREDATES for a tree without a second load path, UPSTREAM when its choice considers the addresses."""
        text = source.decode(*_CODEC)
        try:
            found = functions(text, SELECTOR)
        except ValueError:
            return State.UNKNOWN, "unbalanced brackets"
        if not found:
            if SELECTOR in text:
                return State.UNKNOWN, f"{SELECTOR} is mentioned but not defined here"
            return State.PREDATES, "this ck_tile has only 32-bit page offsets"
        if len(found) > 1:
            return State.UNKNOWN, f"{len(found)} definitions of {SELECTOR}"
        function = found[0]
        ours = texts(_SELECT_GLOBAL)
        if function.body[: len(ours)] == ours:
            return State.APPLIED, "small pages always take the 64-bit load path"
        if "*" in function.parameters or any("ptr" in name for name in function.parameters):
            return State.UPSTREAM, "the choice already considers the base addresses"
        if not {"page_block_size", "kN0"} <= set(function.parameters) or not {"GLOBAL_LOAD_LDS", _MODE} <= set(
            function.body
        ):
            return State.UNKNOWN, f"{SELECTOR} has another form"
        return State.ORIGINAL, "the 64-bit load path is chosen by the size of the pool alone"

    def apply(self, source: bytes) -> bytes:
        """Insert our choice before the function's own, on new lines that are one step deeper than the brace's line."""
        text = source.decode(*_CODEC)
        [function] = functions(text, SELECTOR)
        at, newline = function.body_start, "\r\n" if "\r\n" in text else "\n"
        line = text[text.rfind("\n", 0, at) + 1 : at]
        indent = newline + line[: len(line) - len(line.lstrip())] + "    "
        inserted = "".join(indent + row for row in _SELECT_GLOBAL.splitlines())
        return (text[:at] + inserted + text[at:]).encode(*_CODEC)


_SELECT_GLOBAL = """\
// Added by kimi-w4a8-eagle3: a buffer load's offset has 32 bits, so every page smaller than one
// K/V tile takes the path that computes 64-bit addresses, whatever the pool's size and place.
if(page_block_size < kN0)
    return ck_tile::BlockAttentionKVCacheLoadModeEnum::GLOBAL_LOAD_LDS;
"""

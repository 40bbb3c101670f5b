"""Edit of ck_tile's batch-prefill FMHA, whose page offsets outgrow 32 bits.

A page smaller than one K/V tile cannot have a buffer descriptor of its own, so the kernel puts the whole offset `page *
page stride` into the 32-bit offset register of a buffer load. Computing that product in 64 bits changes nothing,
because the register truncates it again. Newer trees have a second load path with 64-bit addresses and a function that
selects the path. The edit makes it select the second path for every small page.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpp import Function, functions, texts
from .edit_state import State

SELECTOR = "fmha_batch_prefill_select_kv_load_mode"
_MODE = "BlockAttentionKVCacheLoadModeEnum"


@dataclass(frozen=True)
class SmallPagesLoadGlobally:
    """In `fmha_fwd.hpp`: pages smaller than a K/V tile always take the load path with 64-bit addresses."""

    def inspect(self, source: bytes) -> tuple[State, str]:
        """Return PREDATES for a tree without a second load path, UPSTREAM when its choice considers the addresses."""
        text = _decode(source)
        found = _definitions(text, {SELECTOR})
        if found is None:
            return State.UNKNOWN, "unbalanced brackets"
        if not found:
            if SELECTOR in text:
                return State.UNKNOWN, f"{SELECTOR} is mentioned but not defined here"
            return State.PREDATES, "this ck_tile has only 32-bit page offsets"
        if len(found) > 1:
            return State.UNKNOWN, f"{len(found)} definitions of {SELECTOR}"
        function = found[0]
        if _starts_with(function, _SELECT_GLOBAL):
            return State.APPLIED, "small pages always take the 64-bit load path"
        if "*" in function.parameters or any("ptr" in name for name in function.parameters):
            return State.UPSTREAM, "the choice already considers the base addresses"
        if not {"page_block_size", "kN0"} <= set(function.parameters) or not {"GLOBAL_LOAD_LDS", _MODE} <= set(
            function.body
        ):
            return State.UNKNOWN, f"{SELECTOR} has another form"
        return State.ORIGINAL, "the 64-bit load path is chosen by the size of the pool alone"

    def apply(self, source: bytes) -> bytes:
        """Insert our choice before the function's own."""
        text = _decode(source)
        return _encode(_insert(text, [(f.body_start, _SELECT_GLOBAL) for f in functions(text, {SELECTOR})]))


_SELECT_GLOBAL = """\
// Added by kimi-w4a8-eagle3: a buffer load's offset has 32 bits, so every page smaller than one
// K/V tile takes the path that computes 64-bit addresses, whatever the pool's size and place.
if(page_block_size < kN0)
    return ck_tile::BlockAttentionKVCacheLoadModeEnum::GLOBAL_LOAD_LDS;
"""


def _definitions(text: str, names: set[str]) -> list[Function] | None:
    try:
        return functions(text, names)
    except ValueError:
        return None


def _starts_with(function: Function, block: str) -> bool:
    expected = tuple(texts(block))
    return function.body[: len(expected)] == expected


def _insert(text: str, places: list[tuple[int, str]]) -> str:
    """Insert each block on new lines after its offset, indented one step deeper than the brace's line."""
    newline = _newline(text)
    for offset, block in sorted(places, reverse=True):
        line = text[text.rfind("\n", 0, offset) + 1 : offset]
        indent = line[: len(line) - len(line.lstrip())] + "    "
        lines = newline.join(indent + row if row else row for row in block.rstrip("\n").split("\n"))
        text = text[:offset] + newline + lines + text[offset:]
    return text


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _decode(source: bytes) -> str:
    return source.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

"""Docstrings and comments name only what exists: in backticks an identifier, a file, or a command of `kimi-w4a8`."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache

import pytest
from support.repository import ROOT, known_paths, tracked

FOLDERS = ("kimi_w4a8_eagle3/", "kimi_w4a8_lab/", "kimi_w4a8_laptop/", "proof/", "launch/")
# Names of installed libraries, of a formula, and of a pattern.
OF_OTHERS = {"cpu_has_amx_support", "xet_get", "stall", "exported_NAME", "_forward_isolation"}
OWN = "tests/base/test_docstrings.py"  # names what does not exist
TEXTS = (tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))  # since Python 3.12
WORD = re.compile(r"[A-Za-z_]\w*")
STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
FILE = re.compile(r"[\w./-]+\.(?:py|sh|toml|json|yaml|yml|md|txt)")


@cache
def parts(name: str) -> tuple[list[tuple[int, str]], set[str]]:
    """Line and text of each docstring and comment of a file, and the identifiers and words of texts in its code."""
    prose: list[tuple[int, str]] = []
    found: set[str] = set()
    first = True  # of a statement
    for token in tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline):
        if token.type == tokenize.COMMENT or (first and token.type == tokenize.STRING):
            prose.append((token.start[0], token.string))
        elif token.type in TEXTS:
            found.update(WORD.findall(token.string))
        first = token.type in STARTS or (first and token.type in (tokenize.COMMENT, tokenize.NL))
    return prose, found


@cache
def words() -> frozenset[str]:
    """Identifiers and words in the code without its prose; words of all other files but pages; names of files."""
    found = {part.removesuffix(".py") for name in tracked() for part in name.split("/")} | OF_OTHERS
    for name in set(tracked()) - {OWN}:
        path = ROOT / name
        if name.endswith(".py"):
            found |= parts(name)[1]
        elif path.suffix in (".toml", ".sh", ".json", ".yml", ".yaml", "") and path.stat().st_size < 400_000:
            found.update(WORD.findall(path.read_text(errors="replace")))
    return frozenset(found)


def unknown(text: str) -> list[str]:
    """Return what a docstring or comment names in backticks that is not there."""
    missing = []
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if FILE.fullmatch(span):
            missing += [span] if span not in known_paths() and "/" in span else []
        elif re.fullmatch(r"[A-Za-z_][\w.]*(?:\(\))?", span):
            missing += [part for part in re.findall(r"\w+", span) if part not in words()]
        elif command := re.match(r"kimi-w4a8 ([a-z]\w*)", span):
            missing += [span] if command[1].replace("-", "_") not in words() else []
    return missing


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_names_only_what_exists(folder: str) -> None:
    names = [name for name in tracked() if name.startswith(folder) and name.endswith(".py")]
    found = {f"{name}:{line}": unknown(text) for name in names for line, text in parts(name)[0]}
    assert {place: missing for place, missing in found.items() if missing} == {}


@pytest.mark.parametrize(
    "text",
    ["See `no_such_function`.", "In `moe/nothing_here.py`.", "`launch.no_such_attr`", "`kimi-w4a8 nosuchverb x`"],
)
def test_a_name_that_does_not_exist_is_found(text: str) -> None:
    assert unknown(text)

"""The command lines of the pages: in blocks, and in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from support.repository import ROOT

from kimi_w4a8_eagle3.cli import PROGRAM

PAGES = sorted(
    {*(page for where in ("*.md", "docs/**/*.md", "*/README.md", ".github/**/*.md") for page in ROOT.glob(where))}
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
PROGRAMS = rf"{PROGRAM}|make|docker-run\.sh|pip install|python -m (?:proof|kimi_w4a8_eagle3)"
KNOWN = re.compile(rf"(?:\S*/)?(?:{PROGRAMS})(?![\w-])")


def commands(page: str, known: re.Pattern[str] = KNOWN) -> Iterator[tuple[list[str], bool]]:
    """Words of each command line, and whether it stands alone: in the text `kimi-w4a8 bench ab` may only be a name."""
    blocks = [body for language, body in FENCED.findall(page) if language != "python"]
    prose = FENCED.sub("", page)
    blocks += [block for block in INDENTED.findall(prose) if block.strip()]
    spans = re.findall(r"`([^`]+)`", INDENTED.sub("\n", prose))
    for alone, texts in ((True, blocks), (False, [span.replace("\n", " ") for span in spans])):
        for text in (text for text in texts if known.search(text)):
            yield from ((line, alone) for line in lines(text) if known.match(" ".join(line)))


def lines(text: str) -> Iterator[list[str]]:
    """Words up to a newline, a pipe or `&&`, without prompts, comments, variables and brackets of what is optional."""
    lexer = shlex.shlex(COMMENT.sub("", text).replace("\\\n", " "), posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    line: list[str] = []
    for token in [*lexer, "\n"]:
        if set(token) <= set(";|&<>\n"):
            yield line
            line = []
        elif token not in {"$", "..."} and (line or not re.match(r"\w+=", token)):
            line.append(re.sub(r"\](\.\.\.)?$", "", token.removeprefix("[")) if not token.startswith(".[") else token)

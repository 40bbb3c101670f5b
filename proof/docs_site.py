"""Hooks of the docs site: the README, a page for the command line from the code, and links that leave `docs/`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kimi_w4a8_eagle3.cli import PROGRAM, load, verbs

CLI_PAGE = "cli.md"
README_PAGE = "overview.md"
_README = Path(__file__).parents[1] / "README.md"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and the page of the command line."""
    files.append(File.generated(config, CLI_PAGE, content=cli_page()))
    files.append(File.generated(config, README_PAGE, content=readme_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository outside `docs/` into text, because the site does not have them."""
    folders = page.file.src_uri.count("/")  # between the page and `docs/`

    def inside(link: re.Match[str]) -> str:
        return link[0] if link[0].count("../") <= folders else f"{link[1]} (`{link[2]}`)"

    return _OUTSIDE.sub(inside, markdown)


def readme_page() -> str:
    """Return the README with its links into `docs/` as links between pages, and those to other files as text."""
    text = re.sub(r"\]\(docs/", "](", _README.read_text())
    named = r"!\[[^\]]*\]\([^)]*\)|[^\[\]]+"  # a badge, or words
    return re.sub(rf"(?<!!)\[({named})\]\((?:LICENSE|\.github/[^)]*)\)", r"\1", text)


def cli_page() -> str:
    """Return the help of every command as Markdown."""
    os.environ["COLUMNS"] = "100"
    what = f"This page has the help of every `{PROGRAM}` command, written by the program itself."
    lines = ["# Command line", "", what, ""]
    for name in verbs():
        for words, text in helps(load(name), (PROGRAM, name)):
            lines += [f"{'#' * len(words)} {' '.join(words)}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def helps(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the words and the help of a command and of its sub-commands."""
    context = typer.Context(command, info_name=" ".join(words), help_option_names=["-h", "--help"])
    yield words, command.get_help(context)
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, (*words, name))

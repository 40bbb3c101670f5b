"""Every command line of the pages, in blocks and in the text, is parsed by what would run it; nothing is run.

`kimi-w4a8` by its own commands (with recipes, workloads and --set by what reads them), make by its targets, `python -m
proof.X` by the module's options, pip by the extras. Other programs' files are held by tests/base/test_house.py.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib
from support.page_lines import PAGES, commands
from support.repository import ROOT
from typer.main import get_command

from kimi_w4a8_eagle3.cli import PROGRAM, app
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.schema import one_recipe
from kimi_w4a8_lab.speed.workloads import load_workload

RECIPES = ("recipe", "a", "b")  # parameters that name one, or several


def wrong(words: list[str], alone: bool) -> str | None:
    """Return the reason why a command line is wrong, or None."""
    program, *rest = words
    checks: dict[str, Callable[[list[str]], None]] = {"make": made, "python": of_proof, "pip": extras}
    try:
        if Path(program).name == "docker-run.sh" and rest[:1] == ["up"]:  # its own options, then those of serve
            listen = 2 if rest[2:3] == ["--listen"] else 0
            ours(["serve", rest[1], *rest[2 + listen + (2 if rest[2 + listen :][:1] == ["--as"] else 0) :]], alone)
        elif Path(program).name in {PROGRAM, "docker-run.sh"}:
            ours(rest, alone)
        elif rest[:2] == ["-m", "kimi_w4a8_eagle3"]:
            ours(rest[2:], alone)
        else:
            checks[Path(program).name](rest)
    except Exception as error:  # click's own kinds, KimiError, AssertionError: all are reported with the line
        if getattr(error, "exit_code", None) == 0 or (not alone and type(error).__name__ == "MissingParameter"):
            return None  # --help; a command named in a sentence
        return f"{shlex.join(words)}: {getattr(error, 'message', None) or error}"
    return None


def ours(words: list[str], alone: bool) -> None:
    """Parse `kimi-w4a8 WORDS`, to the recipe and the workload."""
    command: Any = get_command(app)
    name, parent = PROGRAM, command.context_class(command)
    while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
        name, command, words = command.resolve_command(parent, words)
    if not words and (not alone or hasattr(command, "resolve_command")):
        return
    given = command.make_context(name, words, parent=parent)
    extra, found = given.args, given.params
    named = found.get("name") if "recipe" in found else None
    if found.get("recipe") and named:  # as commands/serve.py
        extra, named = [named, *extra], None
    values = [named] if named else [found[key] for key in RECIPES if found.get(key)]
    recipes = [name for value in values for name in (value if isinstance(value, (list, tuple)) else [value])]
    assert not (name == "serve" and alone) or one_recipe(named, found.get("recipe"))
    for recipe in recipes:
        if not recipe.removesuffix(".toml").isupper():  # no placeholder
            resolve(load_recipe(recipe.partition(":")[0]), found.get("settings") or [], extra)
    workload = found.get("workload") or []
    for name in [workload] if isinstance(workload, str) else workload:
        load_workload(name)


def made(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    unknown = {word for word in words if "=" not in word and not word.startswith("-")} - targets
    assert not unknown, f"no target {', '.join(unknown)}"


def of_proof(words: list[str]) -> None:
    """The module's options by its source: importing some takes seconds."""
    assert words[0] == "-m"
    words = words[1:] if words[1].endswith(".run_module") else words  # which runs the module after it
    path = ROOT / words[1].replace(".", "/")
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text())
    known = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    known |= {f"--{node.arg.replace('_', '-')}" for node in ast.walk(tree) if isinstance(node, ast.arg)}
    unknown = {word for word in words[2:] if word.startswith("--")} - known
    assert not unknown, f"no option {', '.join(unknown)}"


def extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {extra for word in words for extra in re.findall(r"^\.\[([\w,-]+)\]$", word)}
    unknown = {extra for names in asked for extra in names.split(",")} - set(known)
    assert not unknown and not any(PROGRAM in word for word in words), f"not installable: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_of_a_page_can_be_meant(page: Path) -> None:
    assert [found for words, alone in commands(page.read_text()) if (found := wrong(words, alone))] == []


@pytest.mark.parametrize(
    "text",
    [
        "    kimi-w4a8 serve tiny --no-such-option\n",
        "    kimi-w4a8 serve\n",
        "    KEY=x .venv/bin/kimi-w4a8 serve tinny      # comment\n",
        "    launch/docker-run.sh fetch -r agents\n",
        "```sh\nopenssl rand -hex 32 > key && kimi-w4a8 trust --yess\n```\n",
        "```\n$ kimi-w4a8 bench con3 --base-url URL\n```\n",
        "    kimi-w4a8 bench ab --a w4a8\n",
        "    kimi-w4a8 serve tiny \\\n      --set optons.speculation=adaptive\n",
        "A word on `kimi-w4a8 eval lossles`.",
        "Or `kimi-w4a8 plan agent\n--gpuu mi325x`.",
        "`make dem`",
        "`python -m proof.fuzz --minute 3`",
        "`python -m proof.fuss`",
        "`pip install '.[al]'`",
        "`pip install 'kimi-w4a8-eagle3[eval]'`",
    ],
)
def test_a_command_line_that_cannot_be_meant_is_found(text: str) -> None:
    assert [wrong(words, alone) for words, alone in commands(text)] != [None]
    assert any(wrong(words, alone) for words, alone in commands(text))


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## Where the logs are")[0]
    sources = [*ROOT.glob("kimi_w4a8_*/**/*.py"), ROOT / "requirements/install.sh"]
    code = "".join(path.read_text() for path in sources)
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", page, flags=re.MULTILINE)
    parts = {
        part.strip() for cell in cells for quoted in re.findall(r"`([^`]+)`", cell) for part in quoted.split("...")
    }
    assert len(parts) > 20 and {part for part in parts if part not in code} == set()

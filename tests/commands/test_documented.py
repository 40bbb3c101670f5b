"""Every command line of the pages runs here, or is parsed by what would run it where it needs a GPU, Docker or hours.

`kimi-w4a8` parses by its own commands (with recipes, workloads and --set by what reads them), make by its targets,
`python -m proof.X` by the module's options, pip by the extras. bash and Python read their blocks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.toml import tomllib
from kimi_w4a8_eagle3.cli import PROGRAM, app, load, verbs
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_eagle3.recipe.schema import one_recipe
from kimi_w4a8_lab.speed.workloads import load_workload

PAGES = sorted(
    {*(page for where in ("*.md", "docs/**/*.md", "*/README.md", ".github/**/*.md") for page in ROOT.glob(where))}
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
PROMPTED = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
PROGRAMS = rf"{PROGRAM}|make|docker-run\.sh|pip install|python -m (?:proof|kimi_w4a8_eagle3)"
KNOWN = re.compile(rf"(?:\S*/)?(?:{PROGRAMS})(?![\w-])")
RECIPES = ("recipe", "a", "b")  # parameters that name one, or several
# Lines that end within seconds on a CPU, and write nothing. `serve` runs as a dry run.
HERE = re.compile(
    rf"{PROGRAM} (bench (list|predict .*)|recipes|gates|patch( --check)?|plan agent .*|serve .*)"
    r"|python -m proof\.account -c 40"
)
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|/models|\.\.\.")


def commands(page: str) -> Iterator[tuple[list[str], bool]]:
    """Words of each command line, and whether it stands alone: in the text `kimi-w4a8 bench ab` may only be a name."""
    blocks = [body for language, body in FENCED.findall(page) if language != "python"]
    prose = FENCED.sub("", page)
    blocks += [block for block in INDENTED.findall(prose) if block.strip()]
    spans = re.findall(r"`([^`]+)`", INDENTED.sub("\n", prose))
    for alone, texts in ((True, blocks), (False, [span.replace("\n", " ") for span in spans])):
        for text in (text for text in texts if KNOWN.search(text)):
            yield from ((line, alone) for line in lines(text) if KNOWN.match(" ".join(line)))


def lines(text: str) -> Iterator[list[str]]:
    """Words up to a newline, a pipe or `&&`, without prompts, comments, variables and brackets of what is optional."""
    typed = PROMPTED.findall(text)  # what else such a block holds was printed
    text = COMMENT.sub("", "\n".join(typed) or text).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    line: list[str] = []
    for token in [*lexer, "\n"]:
        if set(token) <= set(";|&<>\n"):
            yield line
            line = []
        elif token not in {"$", "..."} and (line or not re.match(r"\w+=", token)):
            line.append(re.sub(r"\](\.\.\.)?$", "", token.removeprefix("[")) if not token.startswith(".[") else token)


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


ALONE = sorted({" ".join(words) for page in PAGES for words, alone in commands(page.read_text()) if alone})
RUN = sorted(
    {
        line if "--dry-run" in line else line.replace(f"{PROGRAM} serve ", f"{PROGRAM} serve --dry-run ")
        for line in (line.removeprefix(".venv/bin/") for line in ALONE)
        if HERE.fullmatch(line) and not PLACEHOLDER.search(line)
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_of_a_page_can_be_meant(page: Path) -> None:
    text = page.read_text()
    assert [found for words, alone in commands(text) if (found := wrong(words, alone))] == []
    shell = "\n".join(body for language, body in FENCED.findall(text) if language in ("sh", "bash", "console"))
    for program in (body for language, body in FENCED.findall(text) if language == "python"):
        ast.parse(program)
    done = subprocess.run(["bash", "-n"], input=shell.replace("\n$ ", "\n"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        "    kimi-w4a8 serve tiny \\\n      --set optons.context=1\n",
        "A word on `kimi-w4a8 eval lossles`.",
        "`make dem`",
        "`python -m proof.fuss`",
        "`pip install '.[al]'`",
    ],
)
def test_a_command_line_that_cannot_be_meant_is_found(text: str) -> None:
    assert any(wrong(words, alone) for words, alone in commands(text))


def test_the_examples_of_the_help_can_be_meant() -> None:
    loaded = [load(name) for name in verbs()]
    loaded += [inner for command in loaded for inner in getattr(command, "commands", {}).values()]
    lines = [(command.epilog or "").removeprefix("Example: ").split() for command in loaded]
    assert len(lines) > 35 and [found for words in lines if (found := wrong(words, True))] == []


@pytest.mark.parametrize("line", RUN)
def test_a_line_runs_as_it_stands(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the files of the checkout, so that nothing can be left in the checkout itself."""
    for path in ROOT.iterdir():
        if path.name not in {".venv", "runs", "build"}:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(line)
    if program == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        assert not ended.value.code and capsys.readouterr().out
    else:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 and result.output, result.output or result.exception


def test_ci_runs_what_the_readme_begins_with() -> None:
    script = (ROOT / ".ci/run").read_text()
    for line in ("git clone", "as_user make demo", "as_root make demo", "as_user make lint", "as_user make test-all"):
        assert re.search(rf"^ *{line}\b", script, re.MULTILINE), line


def test_the_figures_of_the_readme_are_the_published_ones() -> None:
    """Those of its table, and of AMD's bars in the picture above it."""
    readme, picture = (ROOT / "README.md").read_text(), (ROOT / "docs/images/throughput.svg").read_text()
    later, earlier = (
        json.loads((ROOT / f"bench/published/mi325x-{name}.json").read_text())["points"]
        for name in ("eagle3", "w4a16-w4a8-w8a8")
    )
    gsm8k = [report["accuracy"] for report in json.loads((ROOT / "eval/published.json").read_text())["reports"]]
    rows = []
    for points, name in ((earlier, "w4a16"), (later, "w4a8"), (later, "eagle3-opt")):
        at_40, at_2 = points["con40"][name], points["con2"][name]
        (right,) = [accuracy[name]["flexible-extract"] for accuracy in gsm8k if name in accuracy]
        speed = f"{at_40['output_throughput_tok_s']:.0f} | {at_40['tpot_median_ms']:.1f} ms"
        rows.append(f"| {speed} | {at_2['tpot_median_ms']:.1f} ms | {right:.2%} |".replace("%", " %"))
        assert f">{at_40['output_throughput_tok_s']:.0f}</text>" in picture
    assert [row for row in rows if row not in readme] == []


def test_the_computed_bars_of_the_readme_are_the_accounts() -> None:
    words = [sys.executable, "-m", "proof.account", "-c", "40"]
    wide = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(words, cwd=ROOT, env=wide, capture_output=True, text=True, timeout=120, check=True)
    row = r"^\| (?:published, by the account|`agent`) +\|.*\| ([\d,]+(?: ± \d+)?) +\| ([\d.]+x) \|$"
    (now, _), (ours, gain) = re.findall(row, done.stdout, re.MULTILINE)
    readme, picture = (ROOT / "README.md").read_text(), (ROOT / "docs/images/throughput.svg").read_text()
    assert all(f">{value}</text>" in picture and value in readme for value in (now, ours)) and gain in readme


def test_the_program_lies_where_the_readme_says() -> None:
    """The environment that runs the tests is the one that `make venv` fills."""
    words = [Path(sys.executable).with_name(PROGRAM), "serve", "tiny", "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "sglang.launch_server" in done.stdout, done.stderr


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## Where the logs are")[0]
    sources = [*ROOT.glob("kimi_w4a8_*/**/*.py"), ROOT / "requirements/install.sh"]
    code = "".join(path.read_text() for path in sources)
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", page, flags=re.MULTILINE)
    parts = {
        part.strip() for cell in cells for quoted in re.findall(r"`([^`]+)`", cell) for part in quoted.split("...")
    }
    assert len(parts) > 20 and {part for part in parts if part not in code} == set()

"""Every command and sub-command is walked: one name for one idea, JSON beside tables, usage errors end with 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import PROGRAM, app, load, run, verbs

# An option means the same thing everywhere: its other name, and the type of its value.
ONE_MEANING = {
    "--recipe": ("-r", (str, list[str])),
    "--output": ("-o", (Path,)),
    "--runs": (None, (Path,)),
    "--model": (None, (Path,)),
    "--draft": (None, (Path,)),
    "--concurrency": ("-c", (int, list[int])),
    "--num-prompts": (None, (int,)),
    "--limit": (None, (int,)),
    "--prompts-file": (None, (str,)),
    "--served-model-name": (None, (str,)),
    "--json": (None, (bool,)),
}
PRINTS_A_TABLE = (
    "check", "doctor", "plan", "gates", "recipes", "bench list", "bench compare", "bench predict", "patch",
)  # fmt: skip


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {inner}", subcommand)


WALKED = dict(found for name in verbs() for found in walk(name, load(name)))
# Every option that takes a number, with a word; every command with an option that it does not have.
WRONG = [
    *([*name.split(), "--no-such-option"] for name in WALKED),
    *(
        [*name.split(), option.opts[0], "word"]
        for name, command in WALKED.items()
        for option in command.params
        if any(
            kind in (int, float)
            for kind in (option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation))
        )
    ),
]


@pytest.mark.parametrize("name", WALKED)
def test_one_name_for_one_idea(name: str) -> None:
    for option in WALKED[name].params:
        names = [*option.opts, *option.secondary_opts]
        for long in ONE_MEANING.keys() & set(names):
            short, types = ONE_MEANING[long]
            assert short is None or short in names
            assert option.type_descriptor.annotation in types
        if {"--recipe", "--a", "--b"} & set(names):
            assert option.metavar == "RECIPE"
    if hasattr(WALKED[name], "commands"):
        return
    answered = CliRunner().invoke(app, [*name.split(), "-h"], prog_name=PROGRAM)
    assert answered.exit_code == 0 and answered.output.startswith(f"Usage: {PROGRAM} {name} ")
    assert not set(answered.output) & set("│╭╰━┃")  # no boxes in a pipe
    assert not re.search(r"<(str|int|float|path|bool|list)\b|\brange>", answered.output)  # no types of Python


@pytest.mark.parametrize("name", PRINTS_A_TABLE)
def test_a_table_can_be_had_as_json(name: str) -> None:
    assert any("--json" in option.opts for option in WALKED[name].params)


@pytest.mark.parametrize(
    "words",
    [
        ["serve"],
        ["serve", "tiny", "--recipe", "tiny"],
        ["serve", "no-such-recipe", "--dry-run"],
        ["serve", "tiny", "--dry-run", "--set", "port"],
        ["serve", "tiny", "--dry-run", "--docker"],
        ["serve", "tiny", "--dry-run", "--set", "optons.speculation=off"],
        ["plan", "tiny"],
        ["plan", "eagle3", "--gpu", "mi99"],
        ["gates", "--moe-backend", "none"],
        ["trust"],
        ["fetch"],
        ["fetch", "agent"],
        ["doctor", "tiny", "--recipe", "tiny"],
        ["bench", "con2"],
        ["bench", "con2", "--recipe", "tiny", "--num-prompts", "0"],
        ["bench", "con3", "--base-url", "http://127.0.0.1:1"],
        ["bench", "ab", "--a", "tiny", "--b", "tiny"],
        ["bench", "ab", "--a", "tiny", "--b", "tiny:plane"],
        ["bench", "predict", "--accept-length", "9"],
        ["patch", "--id", "no-such-patch"],
        ["eval", "smoke"],
        ["eval", "lossless", "--base-url", "http://127.0.0.1:1"],
        pytest.param(["serve", "tiny", "--dry-run", "--", "--chunked-prefil-size", "7"], marks=pytest.mark.slow),
        pytest.param(["plan", "agent", "--gpu", "mi325x", "--set", "chunked-prefil-size=7"], marks=pytest.mark.slow),
        ["prepare"],
        ["ready", "--port", "0"],
        ["ready", "--port", "65535"],
        ["ready", "--timeout", "-1"],
        ["draft", "switch", "link", "--to", "new", "--back"],
        ["bench", "sweep", "--recipe", "no-such-recipe"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_a_usage_error_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(words, prog_name=PROGRAM))
    assert ended.value.code == 2


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_option_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(words, prog_name=PROGRAM))
    assert ended.value.code == 2 and next(word for word in words if word[0] == "-") in capsys.readouterr().err


def test_another_error_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(["check", "/no/such/checkpoint"], prog_name=PROGRAM))
    assert ended.value.code == 1 and "no such model directory" in capsys.readouterr().out


def test_a_recipe_is_named_in_place_or_by_option() -> None:
    given = (["serve", "tiny", "--dry-run"], ["serve", "-r", "tiny", "--dry-run"])
    in_place, by_option = (CliRunner().invoke(app, words) for words in given)
    assert in_place.stdout == by_option.stdout != "" and in_place.exit_code == by_option.exit_code == 0

"""A dataclass of options is one parameter of a command, and its fields stand in its place on the command line."""

import re
from dataclasses import dataclass

import typer
from typer.testing import CliRunner

from kimi_w4a8_lab.commands.groups import expanded


@dataclass(frozen=True)
class Group:
    number: int = typer.Option(1, "--number", min=1)
    words: list[str] = typer.Option([], "--word")


def test_fields_are_options_in_the_place_of_their_group() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @expanded
    def command(
        name: str,
        first: bool = typer.Option(False, "--first"),
        *,
        group: Group,
        last: str = typer.Option("z", "--last"),
    ) -> None:
        seen.append((name, first, group, last))

    runner = CliRunner(env={"TERM": "dumb"})
    assert runner.invoke(app, ["x", "--word", "a", "--number", "5", "--word", "b"]).exit_code == 0
    assert runner.invoke(app, ["y", "--first", "--last", "q"]).exit_code == 0
    assert seen == [("x", False, Group(5, ["a", "b"]), "z"), ("y", True, Group(1, []), "q")]
    assert runner.invoke(app, ["x", "--number", "0"]).exit_code == 2
    shown = re.findall(r"--(first|no-first|number|word|last)\b", runner.invoke(app, ["--help"]).output)
    assert list(dict.fromkeys(shown)) == ["first", "number", "word", "last"]

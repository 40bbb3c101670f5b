"""The `kimi-w4a8` command: the tables of its verbs, and errors as one message.

Each verb is a module of a package `commands`, imported when it is used. `kimi-w4a8 --help` therefore answers at once on
a machine without the dependencies, and the modules can import theirs at the top. The verbs that measure belong to
kimi_w4a8_lab and are found by the entry point `kimi_w4a8_eagle3.verbs`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path
from traceback import extract_tb
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from . import __version__
from .base.errors import KimiError, UsageError
from .base.installed import failed_import
from .base.next_step import pip_install

PROGRAM = "kimi-w4a8"  # `kimi` alone is Moonshot's own client

# Groups of `--help`, as in the README, and their verbs: the first line of the help, and an example. The module has the
# same name, with underscores. It holds a function of that name, or an `app` with sub-commands.
VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "first day": {
        "prepare": ("Prepare this machine for a recipe: checks, download, code.", "prepare agent"),
        "doctor": ("Check this machine for a recipe: hardware, software, limits.", "doctor agent"),
        "fetch": ("Download checkpoints to the Hub's cache, and check every file.", "fetch --recipe agent"),
        "trust": ("Show the Python files of a checkpoint; --yes accepts them.", "trust --recipe agent"),
        "serve": ("Serve a recipe, or show what would run.", "serve agent"),
        "ready": ("Wait until the server of this machine is ready.", "ready --timeout 600"),
    },
    "measure": {},
    "models": {"check": ("Check a checkpoint by configs, headers and small tensors.", "check MODEL --draft DRAFT")},
    "expert": {
        "plan": ("Show memory per GPU, KV capacity and the page guard's verdict.", "plan agent --gpu mi325x"),
        "recipes": ("List the packaged recipes: hardware, status there, summary.", "recipes"),
        "gates": ("List every kernel gate: value, origin, reader, effect.", "gates agent"),
        "warm": ("Compile the MoE kernels ahead of serving; needs no GPU.", "warm --objects DIR"),
        "patch": ("Apply the patches of AITER's sources that fit.", "patch --check"),
    },
}
_GROUP = "kimi_w4a8_eagle3.verbs"  # entry points: package of the modules -> its table
_VALUES = {"path": "PATH", "int": "N", "float": "NUMBER"}  # part of a type: the word in the help
_NAMED = {"recipe": "RECIPE", "a": "RECIPE", "b": "RECIPE", "base_url": "URL", "settings": "KEY=VALUE"}  # options


class Commands(TyperGroup):
    """Group of the commands in the table; each command is imported only when it runs."""

    def __init__(self, **attributes: Any) -> None:
        titles: dict[str, str] = {}  # of the groups, with the example of their first verbs
        stubs = {}
        for name, (_, group, line, example) in verbs().items():
            title = titles.setdefault(group, f"{group.capitalize()}, for example `{PROGRAM} {example}`")
            stubs[name] = TyperCommand(name, help=line, rich_help_panel=title)
        super().__init__(**{**attributes, "commands": stubs})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs in their groups, as typer does for terminals."""
        width = max(map(len, self.commands))
        for title, stubs in groupby(self.commands.items(), lambda item: getattr(item[1], "rich_help_panel", "")):
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), stub.help) for name, stub in stubs])

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read `help VERB` as `VERB --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the typed command, fully loaded."""
        if "bench" not in self.commands and args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(
                f"this installation has no command {args[0]!r}",
                expected=", ".join(self.commands),
                remedy="bench, eval and others that measure are in kimi_w4a8_lab, in a checkout: "
                + pip_install("-e", "'.[all]'"),
            )
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load(args[0]) if stub else None, rest

    def invoke(self, ctx: Any) -> object:
        """Run a command; Ctrl-C ends it with one line and exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo(f"\n{PROGRAM}: stopped by Ctrl-C", err=True)
            raise typer.Exit(130) from None


@cache
def verbs() -> dict[str, tuple[str, str, str, str]]:
    """Return package, group, first line of help and example of each installed verb, in the order of `--help`."""
    tables = {f"{__package__}.commands": VERBS}
    for entry in entry_points(group=_GROUP):
        with suppress(ModuleNotFoundError):  # the metadata outlives a package that was left out
            tables[entry.module] = entry.load()
    return {
        name: (package, group, *row)
        for group in VERBS
        for package, table in tables.items()
        for name, row in table.get(group, {}).items()
    }


def load(name: str) -> Any:
    """Import a verb with its dependencies and return it as a click command."""
    (package, _, _, example), module_name = verbs()[name], name.replace("-", "_")
    module = import_module(f"{package}.{module_name}")  # start-up: one verb with its libraries
    typed = getattr(module, "app", None) or typer.Typer(pretty_exceptions_enable=False)
    typed.rich_markup_mode, typed._add_completion = app.rich_markup_mode, False
    if not hasattr(module, "app"):
        typed.command(name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(getattr(module, module_name))
    command = _plain(typer.main.get_command(typed))
    command.epilog = f"Example: {PROGRAM} {example}"
    return command


def _plain(command: Any) -> Any:
    """Name values in the help as other command lines do, N or PATH, where newer typers print Python types."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            parameter.metavar = parameter.metavar or _NAMED.get(parameter.name)
        if kind := getattr(parameter, "type_descriptor", None):
            words = [word for name, word in _VALUES.items() if name in str(kind.annotation).lower()]
            shown = "" if parameter.param_type_name == "argument" else [*words, "TEXT"][0]
            if not kind.is_choice:
                parameter.display_type = lambda ctx, shown=shown: shown
    for inner in getattr(command, "commands", {}).values():
        _plain(inner)
    return command


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode="rich" if sys.stdout and sys.stdout.isatty() else None,  # no boxes in a pipe
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Serve, benchmark and validate Kimi-K2.5 W4A8 with EAGLE3 on AMD Instinct MI325X.

    `kimi-w4a8 help COMMAND` explains a command and its options.
    """


def main() -> None:
    """Run the command line."""
    run(lambda: app(prog_name=PROGRAM))


def run(command: Callable[[], object]) -> None:
    """Call a program, and end it with one message for what a user can repair.

    That is a KimiError, a missing optional package, a file that cannot be opened or nests too deeply, and standard
    output that is closed or full.
    """
    with suppress(KeyError, ValueError):
        if int(os.environ["COLUMNS"]) < 20:  # too narrow for a table; 0 in some editors and containers
            del os.environ["COLUMNS"]
    try:
        if sys.stdout is None:
            raise KimiError("standard output is closed", remedy="leave it open, or send it to a file")
        try:
            try:
                command()
            finally:
                sys.stdout.flush()
        except ModuleNotFoundError as error:
            raise failed_import(error) or error from error
        except OSError as error:
            raise _unusable(error) from error
        except RecursionError as error:
            raise _too_deep(error) from error
    except KimiError as error:
        import_module(f"{__package__}.base.run_dir").remove_empty()  # start-up: psutil
        Console(stderr=True, highlight=False).print(f"[bold red]{PROGRAM}:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)


def _too_deep(error: RecursionError) -> Exception:
    """Return the message for a file of JSON or TOML that nests too deeply; the error itself if no parser raised it."""
    modules = {Path(frame.filename).parent.name for frame in extract_tb(error.__traceback__)}
    if not modules & {"json", "tomllib", "tomli"}:
        return error
    return KimiError("a file is not valid: its lists or tables nest too deeply", remedy="give another file")


def _unusable(error: OSError) -> KimiError:
    """Return the message for a file, or for standard output, of which the system refused the use."""
    try:
        sys.stdout.flush()
    except OSError as refused:
        # What is left in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason, where, remedy = refused.strerror, "standard output", "make room, or send it to another place"
    else:
        reason, where = error.strerror or str(error), str(error.filename or "")
        remedy = "check the path, its permissions and the disk"
    return KimiError(f"the system refused it: {reason}", where, remedy=remedy)


if __name__ == "__main__":
    main()

"""`kimi-w4a8 prepare`: make this machine able to serve a recipe: checks, download, trust in the checkpoints' code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import KimiError, on_host
from ..base.finding import Severity
from ..doctor.probe import Probe
from ..doctor.runner import examine
from ..fetch.download import hub_repositories
from ..recipe.arguments import command_words, parse_arguments, require_parsed
from ..recipe.launch import Launch, load_recipe, resolve, with_folders
from ..recipe.schema import one_recipe
from ..recipe.trusted_code import Source, accept, locate, record_path, state
from .fetch import say
from .options import RECIPE, RECIPE_NAME
from .trust import show

# The words of `serve` may follow, so that `up` prepares what it starts. These of its options change no engine argument.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_OF_SERVE = {"any-hardware", "api-key-file", "drain-timeout", "gpu", "no-preflight", "ops-host", "ops-port", "runs"}


def prepare(
    context: typer.Context,
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    settings: Annotated[list[str] | None, typer.Option("--set", help="As in `kimi-w4a8 serve`.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Directory instead of the recipe's model.")] = None,
    draft: Annotated[Path | None, typer.Option("--draft", help="Directory instead of the recipe's draft.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Accept the checkpoints' Python files, unasked.")] = False,
) -> None:
    """Prepare this machine for a recipe: checks, download, code.

    What is done already is skipped, so the same command continues after an interruption. Each step is a command of its
    own, too: doctor, fetch, trust.
    """
    named = with_folders(load_recipe(one_recipe(name, recipe)), {"model": model, "draft": draft})
    asked = {option: value for option, value in parse_arguments(context.args).items() if option not in _OF_SERVE}
    launch = resolve(named, settings or [], command_words(asked))
    if launch.untested:
        require_parsed(launch.args)
    _check(launch)
    _fetch(launch)
    _trust(launch, trust)


def _check(launch: Launch) -> None:
    """Raise KimiError for what stops a start."""
    report = examine(Probe(), launch)
    stops = [found for found in report.results if found.severity is Severity.FAIL]
    if stops:
        lines = "".join(f"\n  - {found.name}: {found.found} -> {on_host(found.remedy)}" for found in stops)
        raise KimiError(f"this machine cannot serve {launch.name}:{lines}", remedy="mend it and repeat the command")
    counts = ", ".join(f"{count} {what}" for what, count in report.counts.items() if count)
    warned = on_host(f"; `kimi-w4a8 doctor {launch.name}` shows them") if report.counts["warn"] else ""
    say(f"1 of 3, machine: {counts}{warned}")


def _fetch(launch: Launch) -> None:
    """Download the checkpoints that are not here, and compare every digest."""
    for repository in hub_repositories(launch.recipe):
        here = repository.here()
        if here is None or here.sizes is None or here.missing or not here.verified:
            say(f"2 of 3, download: {repository}")
            here = repository.fetch(say)
        say(f"2 of 3, download: {repository.repo} is complete and verified, in {here.folder}")


def _trust(launch: Launch, accepted: bool) -> None:
    """Show the Python files that SGLang may execute, and record them once a person accepts them."""
    checkpoints = [one for one in launch.recipe.checkpoints if not one.repo.startswith("builtin:")]
    sources = [locate(one.repo, one.revision) for one in checkpoints]
    new = [source for source in sources if {*state(source).values()} - {"accepted"}]
    if new:
        say("3 of 3, code: SGLang may execute these Python files of the checkpoints. Read them first:")
        show(new)
        _require_yes(new, accepted)
        accept(new)
    found = f"accepted, as recorded in {record_path()}" if any(map(Source.code, sources)) else "none"
    say(f"3 of 3, code: {found}")


def _require_yes(sources: list[Source], accepted: bool) -> None:
    """Ask for consent; raise KimiError if it is refused, or if there is nobody to ask."""
    if accepted or (sys.stdin.isatty() and typer.confirm("Do you accept them?")):
        return
    names = " ".join(source.name for source in sources)
    what = "the checkpoints' Python files were not accepted, so no engine may run them"
    raise KimiError(what, remedy=f"repeat the command and answer y, give --trust, or: kimi-w4a8 trust {names} --yes")

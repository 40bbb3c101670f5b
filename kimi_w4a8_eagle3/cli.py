"""The `kimi` command: registers one function per sub-command and turns KimiError into one clear message.

Each command lives in `commands/<name>.py` and imports its machinery (torch, sglang, ...) inside the function,
so that `kimi --help` answers at once on a bare machine.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from . import __version__
from .commands import (
    bench,
    check,
    demo,
    doctor,
    eval,
    fetch,
    gates,
    inferencex,
    kernels,
    patch,
    plan,
    quantize,
    report,
    route,
    scale_demo,
    serve,
    tiny,
    top,
    trust,
    tune_moe,
    warm,
)
from .errors import KimiError

app = typer.Typer(
    name="kimi",
    help="Serve, benchmark and validate Kimi-K2.5 W4A8 with EAGLE3 on AMD Instinct MI325X.",
    no_args_is_help=True,
    add_completion=False,
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
    """Serve, benchmark and validate Kimi-K2.5 W4A8 with EAGLE3 on AMD Instinct MI325X."""


app.command("demo")(demo.demo)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("fetch")(fetch.fetch)
app.add_typer(patch.app, name="patch")
app.command("trust")(trust.trust)
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
app.command("route")(route.route)
app.command("scale-demo")(scale_demo.scale_demo)
app.command("top")(top.top)
app.command("plan")(plan.plan)
app.command("gates")(gates.gates)
app.command("kernels")(kernels.kernels)
app.add_typer(quantize.app, name="quantize")
app.command("tune-moe")(tune_moe.tune_moe)
app.command("warm")(warm.warm)
app.add_typer(tiny.app, name="tiny")
app.add_typer(eval.app, name="eval")
bench.app.command("export-inferencex")(inferencex.export_inferencex)
app.add_typer(bench.app, name="bench")
app.command("report")(report.report)


def main() -> None:
    """Run the command line; a KimiError is printed without a traceback and sets the exit code."""
    try:
        app()
    except KimiError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]kimi:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

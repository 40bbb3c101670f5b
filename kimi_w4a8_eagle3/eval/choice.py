"""The server under test: one that already runs, or one started from a recipe for this evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.errors import KimiError, UsageError
from ..base.run_dir import record
from ..engine.behind_router import behind_router
from ..engine.client import EngineClient
from ..engine.process import free_port
from ..fleet import serve as serving
from ..machine.hardware import Machine
from ..recipe.launch import Launch, load_recipe, render, unmet_requirements, with_settings

_READY_TIMEOUT_S = serving.READY_TIMEOUT_S


@dataclass(frozen=True)
class Choice:
    """Server named on the command line by exactly one of base_url and recipe.

    model: name the server must serve. speculate: False removes the recipe's draft. api_key: key sent to the server,
    never recorded. ops_url: operations endpoint of a router; the default is the port after the router's own.
    """

    base_url: str | None = None
    recipe: str | None = None
    model: str | None = None
    speculate: bool = True
    settings: Sequence[str] = ()
    api_key: str | None = field(default=None, repr=False)
    ops_url: str | None = None

    def __post_init__(self) -> None:
        if (self.base_url is None) == (self.recipe is None):
            wanted = "--base-url of a running server, or --recipe to start one"
            raise UsageError("give exactly one of --base-url and --recipe", expected=wanted)

    def launch(self) -> Launch | None:
        """Render the recipe on a free port; None for a server that already runs."""
        if self.recipe is None:
            return None
        recipe = load_recipe(self.recipe)
        if not self.speculate:
            recipe = with_settings(recipe, {"options.speculation": "off"})
        if unmet := unmet_requirements(recipe, Machine.detect()):
            raise KimiError(
                f"this machine cannot serve the recipe {recipe.name!r}: {unmet[0]}",
                remedy="name a running server with --base-url, or try --recipe tiny",
            )
        port = [] if any(s.startswith("port=") for s in self.settings) else [f"port={free_port()}"]
        return render(recipe, [*port, *self.settings])

    def check(self) -> None:
        """Raise KimiError, before a run directory exists, for a silent server, a wrong model or missing GPUs."""
        launch = self.launch()
        if launch is not None:
            serving.checked(launch)
        elif self.base_url is not None:
            _answering(self.base_url, _root(self.base_url), self, None)


@dataclass(frozen=True)
class Target:
    """Server that answers. `name` labels tables; `launch` is None for a server that already ran.

    ops_url: endpoint with the engines' counters when the server is a router.
    """

    name: str
    base_url: str
    model: str
    launch: Launch | None = None
    api_key: str | None = field(default=None, repr=False)
    ops_url: str | None = None


def record_of(kind: str, *targets: Target, **facts: Any) -> dict[str, Any]:
    """Return a run's record: all servers with their launches, and the last server's environment and model."""
    last = targets[-1]
    servers = {t.name: t.launch.described() if t.launch else {"base_url": t.base_url} for t in targets}
    return record(kind, servers, last.launch.env if last.launch else {}, model=last.model, **facts)


@contextmanager
def reached(choice: Choice, folder: Path, console: Console, label: str = "server") -> Iterator[Target]:
    """Yield the chosen server. An engine started here stops at the end of the block and logs into `folder`.

    Raises KimiError when the server does not answer or serves another model than `choice.model`.
    """
    launch = choice.launch()
    if launch is None:
        assert choice.base_url is not None
        base_url = _root(choice.base_url)
        yield _answering(base_url, base_url, choice, None)
        return
    launch = serving.checked(launch)
    name = launch.name + ("" if launch.draft else " without speculation" if not choice.speculate else "")
    with serving.engine(launch, folder / f"{label}.log", name) as server:
        with console.status(f"{name}: starting the engine"):
            seconds = server.wait_ready(_READY_TIMEOUT_S)
        console.print(f"[green]✓[/] {name}: ready after {seconds:.0f} s")
        yield _answering(name, server.base_url, choice, launch)


def _root(base_url: str) -> str:
    """Return the server's address without the OpenAI API's path."""
    return base_url.rstrip("/").removesuffix("/v1")


def _answering(name: str, base_url: str, choice: Choice, launch: Launch | None) -> Target:
    with EngineClient(base_url, choice.api_key) as client:
        served = client.model_name()
    expected = choice.model
    if expected is not None and served != expected:
        raise KimiError(
            f"the server serves {served!r}, not {expected!r}",
            where=base_url,
            expected=repr(expected),
            remedy="check the address, or name the served model with --served-model-name",
        )
    behind = behind_router(base_url, choice.ops_url, choice.api_key) if launch is None else None
    return Target(name, base_url, served, launch, choice.api_key, behind.ops_url if behind else None)

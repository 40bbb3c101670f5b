"""Rendering of a recipe into a server's exact command and environment, with a note for every difference.

`load_recipe` reads and checks a TOML file (see `schema`), `resolve` applies the command line's overrides, and
`Launch.on` adds what depends on the machine (see `on_machine`). `prepare` does all three for `kimi-w4a8 serve`, which
prints or runs the resulting `Launch`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import KimiError, UsageError
from ..base.finding import Finding, Severity
from ..base.http import http_url, is_loopback
from ..base.installed import require_laptop
from ..base.program import Command, Program, words
from ..base.variable import COLLECT
from ..gates import read_gates
from ..gateway.settings import API_KEY, API_KEY_FILE, Settings, read_settings
from ..machine.aiter_regime import Regime, installed_regime
from ..machine.hardware import Gpu, Machine, gpu_by_name
from ..quark.config import is_eagle3
from .arguments import (
    Args,
    allows_code,
    argument_groups,
    attention_tp,
    check_host,
    check_numa_nodes,
    command_words,
    number,
    parse_arguments,
    parse_setting,
    show,
)
from .memory_plan import ModelCard
from .on_machine import (
    Fault,
    apply_faults,
    concerning,
    fit_to_machine,
    missing_gpus,
    unmet_requirements,
    without_core_lists,
)
from .schema import PLAIN, ArgValue, Recipe, RecipeCheckpoint, load_recipe, recipe_names, with_settings

__all__ = [
    "DEFAULT_PORT", "Launch", "Recipe", "load_recipe", "missing_gpus", "parse_arguments", "prepare",
    "recipe_names", "render", "resolve", "unmet_requirements", "with_settings"
]  # fmt: skip

if TYPE_CHECKING:
    from ..engine.fronted import FrontedEngine
    from ..engine.process import EngineServer
    from ..gateway.config import GatewayConfig

DEFAULT_PORT = 30000  # of SGLang
_MOST_WORKERS, _CORES_OF_WORKER = 4, 8  # of the gateway: a laptop's cores are the model's
_TYPED = ("host", "port", "served-model-name", "tp-size")  # this package reads them, or any text is right


@dataclass(frozen=True)
class Launch:
    """Server that can be started; its arguments become command-line words only when the process starts.

    recipe: resolved, with the command line's overrides. args: final typed engine arguments. published: the recipe's
    arguments before overrides and improvements. notes: one sentence for each difference from the published command and
    for each warning. overrides: changes from the command line, as `--name value`. untested: True with an engine
    argument or value that no packaged recipe of this name has, so that only the installed SGLang can check it. env:
    variables added to the caller's environment. refused: known faults that prevent the start. machine: the machine that
    the arguments fit. settings: of the gateway before the engine, from this environment.
    """

    recipe: Recipe
    args: Args
    published: Args = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    untested: bool = False
    env: dict[str, str] = field(default_factory=dict)
    refused: list[Fault] = field(default_factory=list)
    machine: Machine = field(default_factory=Machine)
    settings: Settings = field(default_factory=Settings)

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def model(self) -> str:
        """Model argument of the engine: a Hub id or a directory."""
        return str(self.args["model-path"])

    @property
    def draft(self) -> str | None:
        """Draft model, a Hub id or a directory; None without speculation."""
        draft = self.args.get("speculative-draft-model-path")
        return None if draft is None else str(draft)

    @property
    def host(self) -> str:
        """Address for clients: the gateway's, where `serve` starts one. The engine's default unless set."""
        return str(self.args.get("host", "127.0.0.1"))

    @property
    def port(self) -> int:
        """Port for clients; the engine's default unless set."""
        return number(self.args, "port", DEFAULT_PORT, most=65535)

    @property
    def tensor_parallel(self) -> int:
        return number(self.args, "tp-size", 1)

    @property
    def acceptance(self) -> tuple[int | None, int, float]:
        """The canary's expectations: tokens of a verify step, groups of ranks with own requests, accept length.

        There is more than one group with DP attention.
        """
        groups = self.tensor_parallel // attention_tp(self.args)
        return self.num_draft_tokens, groups, self.recipe.options.least_accept_length

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens per verify step; None without speculation."""
        if "speculative-algorithm" not in self.args:
            return None
        return number(self.args, "speculative-num-draft-tokens", 1)

    @property
    def command(self) -> Command:
        """The engine's program. On a CPU, it runs behind the module that provides the missing operators."""
        program = Program("sglang.launch_server", tuple(command_words(self.args)))
        return program if self.args.get("device") == "cpu" else program.alone

    @property
    def argv(self) -> list[str]:
        return words(self.command)

    @property
    def base_url(self) -> str:
        """Address of the server for a client on this machine."""
        return http_url(self.host, self.port)

    def shell(self) -> str:
        """Return the launch as shell lines: exports, then the command."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        quoted = ["python" if word == sys.executable else shlex.quote(word) for word in self.argv]
        return "\n".join([*exports, " \\\n    ".join(argument_groups(quoted))])

    def described(self) -> dict[str, Any]:
        """Return the launch as JSON types, for display and for a run's record."""
        facts = {name: getattr(self, name) for name in ("argv", "env", "model", "draft", "base_url", "overrides")}
        return {"recipe": self.name, **facts, "notes": [asdict(note) for note in self.notes]}

    def engine(self, log_path: Path, name: str | None = None) -> EngineServer:
        """Return the engine's process, not started: on a free port of loopback, closed without its secret."""
        from ..engine.process import EngineServer, free_port  # start-up: a dry run needs no processes
        from ..gateway.config import ENGINE_ARGUMENTS

        port = free_port()
        private = self.with_args(**ENGINE_ARGUMENTS, host="127.0.0.1", port=port)
        # Clients' keys are the gateway's. Logprobs are the model's own; SGLang's are of tempered logits.
        env = {**self.env, API_KEY: "", API_KEY_FILE: "", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
        return EngineServer(private.command, env, "127.0.0.1", port, log_path, name or f"sglang ({self.name})")

    @property
    def gateway(self) -> GatewayConfig:
        """Settings of the gateway before the engine."""
        from ..gateway.config import GatewayConfig  # start-up: a dry run starts no gateway

        environ, given = {**os.environ, **self.env}, self.settings
        return GatewayConfig(
            checkpoint=str(self.args.get("tokenizer-path", self.model)),
            revision=str(self.args.get("tokenizer-revision", self.args.get("revision", "main"))),
            trusted=any(map(allows_code, self.args)),
            model=str(self.args.get("served-model-name", self.model)),
            check_model=read_gates(environ).check_model_name,
            host=self.host,
            port=self.port,
            workers=max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_OF_WORKER)),
            key=given.key,
            key_file=str(given.key_file or ""),
            max_running=given.max_running,
            max_prompt_tokens=given.max_prompt_tokens,
            max_body_bytes=given.max_body_bytes,
            max_mask_ms=float(given.max_mask_ms),
            collect=environ.get(COLLECT, ""),
        )

    def server(self, log_path: Path, name: str | None = None) -> FrontedEngine:
        """Return the engine with a gateway before it, not started."""
        from ..engine.fronted import FrontedEngine  # start-up: a dry run needs no processes

        return FrontedEngine(self.engine(log_path, name), self.gateway)

    def with_args(self, **changes: ArgValue) -> Launch:
        """Return a copy with engine arguments replaced; `_` stands for the dash of a name."""
        return replace(self, args={**self.args, **{name.replace("_", "-"): value for name, value in changes.items()}})

    def on(self, machine: Machine, gpu: Gpu | None = None, regime: Regime = Regime.UNKNOWN) -> Launch:
        """Return the launch on `machine`; see `render` for gpu and regime."""
        recipe, args = self.recipe, dict(self.args)
        notes = self.notes + fit_to_machine(args, recipe, self.published, machine, gpu, regime)
        refused = apply_faults(self.faults(machine, gpu), args, recipe.options.accept_faults, notes)
        cores, note = without_core_lists(args, recipe, machine)
        notes += note + [Finding(text, Severity.OVERRIDE) for text in self.overrides]
        env = {**recipe.environment, **cores}
        return replace(self, args=args, notes=notes, env=env, refused=refused, machine=machine)

    def faults(self, machine: Machine, gpu: Gpu | None = None) -> list[Fault]:
        """Return the known faults of this launch on `gpu`, the machine's GPU, or else the recipe's reference GPU."""
        reference = self.recipe.hardware.reference
        known = gpu or machine.gpu or (gpu_by_name(reference) if reference else None)
        arch = known.arch if known else next((device.arch for device in machine.devices), None)
        environment = {**machine.environment, **self.recipe.environment}
        return concerning(self.args, environment, arch, machine.installed)


def resolve(recipe: Recipe, settings: Sequence[str] = (), extra: Sequence[str] = ()) -> Launch:
    """Return the launch before any change for a machine.

    settings: overrides in the form of `--set`. extra: engine arguments as typed after `--`. Raises KimiError for a
    setting that no recipe has, and for a value that its engine argument cannot have.
    """
    published, notes = recipe.args, list[Finding]()
    changes = dict(parse_setting(text) for text in settings)
    changes |= {f"args.{name}": value for name, value in parse_arguments(extra).items()}
    recipe = with_settings(recipe, changes)
    args = _assemble(recipe, notes)
    _improve(args, recipe, notes)
    if recipe.options.speculation == "off":
        notes.append(Finding("options.speculation is 'off': the draft and the --speculative-* arguments are removed"))
    _check_draft(args, recipe)
    check_host(args.get("host", "127.0.0.1"))  # here, because a dry run connects to nothing
    number(args, "port", DEFAULT_PORT, most=65535)
    ranks = number(args, "tp-size", 1) // number(args, "nnodes", 1)
    check_numa_nodes(args, int(str(args.get("base-gpu-id", 0))) + ranks)
    shown = [show(key.removeprefix("args."), value) for key, value in changes.items()]
    return Launch(recipe, args, published, notes, shown, _untested(recipe))


def _untested(recipe: Recipe) -> bool:
    """Return True with an engine argument that the packaged recipe of this name lacks, or has with another value."""
    name = recipe.name.removesuffix(PLAIN)
    known = load_recipe(name).final_args if name in recipe_names() else {}
    final = recipe.final_args.items()
    return any(name not in _TYPED and str(known.get(name)) != str(value) for name, value in final)


def _check_draft(args: Args, recipe: Recipe) -> None:
    """Raise UsageError for EAGLE with a draft of EAGLE3, which SGLang would load and then run on wrong inputs."""
    algorithm, path = args.get("speculative-algorithm"), args.get("speculative-draft-model-path")
    if algorithm not in ("EAGLE", "NEXTN") or path is None:  # two names of one algorithm
        return
    revision = str(args.get("speculative-draft-model-revision", "main"))
    if is_eagle3(ModelCard.of(str(path), revision, recipe.draft.card if recipe.draft else None).config):
        what = f"--speculative-algorithm {algorithm} does not fit this draft, which is an EAGLE3 draft"
        raise UsageError(what, str(path), "--speculative-algorithm EAGLE3")


def render(
    recipe: Recipe,
    settings: Sequence[str] = (),
    extra: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    gpu: Gpu | None = None,
    regime: Regime | None = None,
) -> Launch:
    """Return the launch of `recipe` on `machine` (detected by default).

    settings: `KEY=VALUE` as for `--set`; a key without a dot is an engine argument. extra: engine arguments as typed
    after `--`. gpu: assume this GPU instead of the machine's. regime: behaviour of AITER beyond int32, read from the
    installed one by default. Raises KimiError for a launch that cannot start.
    """
    machine = Machine.detect() if machine is None else machine
    if regime is None:
        regime = installed_regime() if recipe.hardware.gpus else Regime.UNKNOWN  # a CPU has none of AITER's kernels
    return resolve(recipe, settings, extra).on(machine, gpu, regime)


def prepare(
    name: str,
    settings: Sequence[str] = (),
    extra: Sequence[str] = (),
    *,
    gpu: str = "",
    checkpoints: Mapping[str, Path | None] = {},
    api_key_file: Path | None = None,
    read_keys: bool = True,
) -> Launch:
    """Return the launch of the recipe `name` here, with every name and value checked; starts and writes nothing.

    checkpoints: folders that replace the recipe's "model" and "draft". api_key_file: file with the clients' keys.
    read_keys: False where only another machine has it. See `render` for the rest. Raises KimiError for a variable of
    this environment that no kernel and no gateway knows, too.
    """
    recipe = with_folders(load_recipe(name), checkpoints)
    launch = render(recipe, settings, extra, gpu=gpu_by_name(gpu) if gpu else None)
    given = {API_KEY_FILE: str(api_key_file), API_KEY: ""} if api_key_file else {}
    environ = {**os.environ, **launch.env, **given}
    read_gates(environ)
    found, notes = read_settings(environ, read_keys), [*launch.notes]
    if not is_loopback(launch.host):
        keyless = "" if found.needs_key else " without a key (--api-key-file FILE)"
        text = f"open to the network at {launch.host}{keyless}; smg in front gives TLS, time-outs and tenants"
        notes.append(Finding(text, Severity.WARN if keyless else Severity.NOTE))
    if (file := found.key_file) and not file.exists():
        notes.append(Finding(f"the key file {file} is not on this machine; a start needs it", Severity.WARN))
    return replace(launch, settings=found, notes=notes)


def with_folders(recipe: Recipe, checkpoints: Mapping[str, Path | None]) -> Recipe:
    """Return the recipe with these folders as its "model" and "draft"; raise UsageError for one that cannot be."""
    for section, folder in checkpoints.items():
        if folder and not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", where=f"--{section}", expected="a checkpoint's folder")
        if folder and getattr(recipe, section) is None:
            raise UsageError(f"the recipe {recipe.name!r} has no draft", where="--draft", expected="one with a draft")
        if folder:
            recipe = with_settings(recipe, {f"{section}.repo": str(folder.resolve()), f"{section}.revision": "main"})
    return recipe


def _assemble(recipe: Recipe, notes: list[Finding]) -> Args:
    """Return the published arguments plus model, revisions and draft."""
    args: Args = {"model-path": _path(recipe.model), **recipe.model.named_revision, **recipe.args}
    if recipe.draft is not None:
        args.setdefault("speculative-draft-model-path", _path(recipe.draft))
        for name, value in recipe.draft.named_revision.items():
            args.setdefault(f"speculative-draft-model-{name}", value)
    if "speculative-algorithm" in args:
        text = "temperature, seeds and penalties: the plugin keeps a draft token only if the target draws the same one"
        notes.append(Finding(text))
    return args


def _improve(args: Args, recipe: Recipe, notes: list[Finding]) -> None:
    """Apply this package's changes and note each with its reason."""
    args.update((name, improvement.value) for name, improvement in recipe.improved_args.items())
    for name, improvement in recipe.improve.items():
        if improvement.value != "auto":
            published = recipe.args.get(name, recipe.env.get(name.removeprefix("env.")))
            was = "not in the published command" if published is None else f"published: {show(name, published)}"
            notes.append(Finding(f"{show(name, improvement.value)} ({was}): {improvement.why}"))


def _path(checkpoint: RecipeCheckpoint) -> str:
    """Return the engine's model path: a Hub id, a directory, or the folder of a built-in model."""
    if not checkpoint.repo.startswith("builtin:"):
        return checkpoint.repo if checkpoint.on_hub else str(Path(checkpoint.repo).expanduser())
    checkpoints: Mapping[str, Callable[[], Path]] = require_laptop("checkpoints", checkpoint.repo)
    if checkpoint.repo not in checkpoints:
        raise KimiError(f"unknown built-in model {checkpoint.repo!r}", expected=", ".join(checkpoints))
    return str(checkpoints[checkpoint.repo]())

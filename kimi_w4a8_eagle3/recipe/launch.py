"""Rendering of a recipe into a server's exact command and environment, with a note for every difference.

`load_recipe` reads and checks a TOML file (see `schema`). `render` applies the command line's overrides and derives
what depends on the machine: NUMA list and memory fraction. `kimi-w4a8 serve` prints or runs the resulting `Launch`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import tiny
from ..base.address import http_url
from ..base.errors import KimiError
from ..gates import OUR_BACKENDS, ignored_gates, read_gates
from ..machine.aiter_regime import Regime
from ..machine.hardware import GIB, Gpu, Machine, gpu_by_name
from . import vllm as vllm_serve
from .arguments import Args, argument_groups, command_words, parse_arguments, parse_setting, show
from .deterministic import with_determinism
from .known_faults import Fault, apply_faults, concerning
from .memory_plan import MemoryPlan, make_plan, number
from .schema import ArgValue, Checkpoint, Recipe, load_recipe, recipe_names, with_settings
from .speculation import apply_speculation

__all__ = [
    "Launch",
    "Recipe",
    "Resolved",
    "load_recipe",
    "parse_arguments",
    "recipe_names",
    "render",
    "resolve",
    "with_settings",
]


@dataclass(frozen=True)
class Launch:
    """Server that can be started; its arguments become command-line words only when the process starts.

    recipe: resolved, with the command line's overrides. args: final typed engine arguments. env: variables added to the
    caller's environment. notes: one sentence for each difference from the published command and for each warning.
    overrides: changes from the command line, as `--name value`. refused: known faults that prevent the start.
    """

    recipe: Recipe
    args: Args
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    refused: list[Fault] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def engine(self) -> str:
        return self.recipe.engine

    @property
    def image(self) -> str | None:
        """Container image of the published figures, if the recipe names one."""
        return self.recipe.image

    @property
    def model(self) -> str:
        """Model argument of the engine: a Hub id or a directory."""
        return str(self.args["model" if self.engine == "vllm" else "model-path"])

    @property
    def draft(self) -> str | None:
        """Draft model, a Hub id or a directory; None without speculation."""
        if self.engine == "vllm":
            return vllm_serve.speculation(self.args).get("model")
        draft = self.args.get("speculative-draft-model-path")
        return None if draft is None else str(draft)

    @property
    def host(self) -> str:
        """Address the engine listens on; the engine's default unless set."""
        return str(self.args.get("host", "0.0.0.0" if self.engine == "vllm" else "127.0.0.1"))

    @property
    def port(self) -> int:
        """Port of the engine; the engine's default unless set."""
        return int(number(self.args, "port", vllm_serve.DEFAULT_PORT if self.engine == "vllm" else 30000))

    @property
    def tensor_parallel(self) -> int:
        """GPUs per engine."""
        return int(number(self.args, "tensor-parallel-size" if self.engine == "vllm" else "tp-size", 1))

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens per verify step; None without speculation, and for vLLM, which counts differently."""
        if "speculative-algorithm" not in self.args:
            return None
        return int(number(self.args, "speculative-num-draft-tokens", 1))

    @property
    def argv(self) -> list[str]:
        return vllm_serve.command(self.args) if self.engine == "vllm" else _sglang_command(self.args)

    @property
    def base_url(self) -> str:
        """Address of the server for a client on this machine."""
        return http_url(self.host, self.port)

    def shell(self) -> str:
        """Return the launch as shell lines: exports, then the command."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        words = ["python" if word == sys.executable else shlex.quote(word) for word in self.argv]
        groups = argument_groups(words)
        return "\n".join([*exports, " \\\n    ".join(groups)])

    def docker(self) -> str | None:
        """Return a shell command that runs the launch in the recipe's image; None if the recipe names no image."""
        return None if self.image is None else vllm_serve.docker_run(self.image, self.argv, self.env)

    def described(self) -> dict[str, Any]:
        """Return the launch as JSON types, for display and for a run's record."""
        names = ("engine", "image", "argv", "env", "model", "draft", "base_url", "notes", "overrides")
        return {"recipe": self.name} | {name: getattr(self, name) for name in names}

    def with_args(self, **changes: ArgValue) -> Launch:
        """Return a copy with engine arguments replaced; `_` stands for the dash of a name."""
        return replace(self, args=_changed(self.args, changes))


@dataclass(frozen=True)
class Resolved:
    """Recipe with the command line's overrides and engine arguments, before any change for a machine.

    published: the recipe's arguments before overrides and improvements.
    """

    recipe: Recipe
    args: Args
    published: Args
    notes: list[str]
    overrides: list[str]

    def with_args(self, **changes: ArgValue) -> Resolved:
        """Return a copy with engine arguments replaced; `_` stands for the dash of a name."""
        return replace(self, args=_changed(self.args, changes))

    def on(self, machine: Machine, gpu: Gpu | None = None, regime: Regime = Regime.UNKNOWN) -> Launch:
        """Return the launch on `machine`; see `render` for gpu and regime."""
        recipe, args, notes = self.recipe, dict(self.args), list(self.notes)
        if recipe.engine == "vllm":  # vLLM sizes its own cache, so nothing depends on the machine
            _warn_unpinned(args, recipe, notes)
            notes += [f"warning: {text}" for text in unmet_requirements(recipe, machine)]
        else:
            _derive_numa(args, self.published, machine, notes)
            known_gpu = gpu or machine.gpu or _reference(recipe, notes)
            _guard_memory(args, recipe, self.published, known_gpu, regime, notes)
            _warn(args, recipe, machine, notes)
        refused = apply_faults(self.faults(machine, gpu), args, recipe.options.accept_faults, notes)
        notes += [f"override: {text}" for text in self.overrides]
        return Launch(recipe, args, recipe.environment, notes, list(self.overrides), refused)

    def faults(self, machine: Machine, gpu: Gpu | None = None) -> list[Fault]:
        """Return the known faults of this launch on `gpu`, the machine's GPU, or else the recipe's reference GPU."""
        reference = self.recipe.hardware.reference
        known = gpu or machine.gpu or (gpu_by_name(reference) if reference else None)
        arch = known.arch if known else next((device.arch for device in machine.devices), None)
        environment = {**machine.environment, **self.recipe.environment}
        return concerning(self.args, environment, arch, machine.installed)


def resolve(recipe: Recipe, settings: Sequence[str] = (), extra: Sequence[str] = ()) -> Resolved:
    """Apply the command line's overrides: `settings` in the form of `--set`, `extra` as typed after `--`.

    Raises KimiError for a setting that no recipe has.
    """
    published, engine, notes = recipe.args, recipe.engine, list[str]()
    typed = {f"args.{name}": value for name, value in parse_arguments(extra, engine).items()}
    recipe = with_determinism(with_settings(recipe, dict(parse_setting(text, engine) for text in settings) | typed))
    args = vllm_serve.assemble(recipe, notes) if engine == "vllm" else _assemble(recipe, notes)
    _improve(args, recipe, notes)
    apply_speculation(args, recipe, notes)
    return Resolved(recipe, args, published, notes, _overrides(engine, settings, extra))


def render(
    recipe: Recipe,
    settings: Sequence[str] = (),
    extra: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    gpu: Gpu | None = None,
    regime: Regime = Regime.UNKNOWN,
) -> Launch:
    """Return the launch of `recipe` on `machine` (detected by default).

    settings: `KEY=VALUE` as for `--set`; a key without a dot is an engine argument. extra: engine arguments as typed
    after `--`. gpu: assume this GPU instead of the machine's. regime: behaviour of the installed AITER beyond int32.
    Raises KimiError for a launch that cannot start.
    """
    return resolve(recipe, settings, extra).on(Machine.detect() if machine is None else machine, gpu, regime)


def _changed(args: Args, changes: Mapping[str, ArgValue]) -> Args:
    return {**args, **{name.replace("_", "-"): value for name, value in changes.items()}}


def _sglang_command(args: Mapping[str, ArgValue]) -> list[str]:
    """Return SGLang's launch command; on a CPU it runs through the module that provides the missing operators."""
    on_cpu = ["kimi_w4a8_eagle3.sglang_plugin.run_module"] if args.get("device") == "cpu" else []
    return [sys.executable, "-m", *on_cpu, "sglang.launch_server", *command_words(args)]


def _assemble(recipe: Recipe, notes: list[str]) -> Args:
    """Return the published arguments plus model, revisions and draft."""
    args: Args = {"model-path": _path(recipe.model)}
    if recipe.model.on_hub and recipe.model.revision != "main":
        args["revision"] = recipe.model.revision
    args.update(recipe.args)
    if recipe.draft is not None:
        args.setdefault("speculative-draft-model-path", _path(recipe.draft))
        if recipe.draft.on_hub and recipe.draft.revision != "main":
            args.setdefault("speculative-draft-model-revision", recipe.draft.revision)
    if "speculative-algorithm" in args:
        notes.append(
            "temperature, seeds and penalties: the plugin keeps a draft token only if the target draws the same one"
        )
    return args


def _improve(args: Args, recipe: Recipe, notes: list[str]) -> None:
    """Apply this package's changes and note each with its reason."""
    args.update((name, improvement.value) for name, improvement in recipe.improved_args.items())
    for name, improvement in recipe.improve.items():
        if improvement.value != "auto":
            published = recipe.args.get(name)
            was = "not in the published command" if published is None else f"published: {show(name, published)}"
            notes.append(f"{show(name, improvement.value)} ({was}): {improvement.why}")


def _overrides(engine: str, settings: Sequence[str], extra: Sequence[str]) -> list[str]:
    parsed = [parse_setting(text, engine) for text in settings]
    shown = [show(key.removeprefix("args."), value) for key, value in parsed]
    return shown + [show(name, value) for name, value in parse_arguments(extra, engine).items()]


def _derive_numa(args: Args, published_args: Args, machine: Machine, notes: list[str]) -> None:
    if args.get("numa-node") != "auto":
        return
    published = published_args.get("numa-node")
    count = int(number(args, "tp-size", 1))
    nodes = machine.numa_nodes(count)
    if nodes is not None:
        args["numa-node"] = nodes
        note = "from this machine's PCI topology"
        notes.append(f"{show('numa-node', nodes)}: {note}" + (", as published" if nodes == published else ""))
    elif isinstance(published, list) and len(published) == count:
        args["numa-node"] = published
        notes.append(
            f"{show('numa-node', published)}: the published list, because this machine's NUMA layout is not readable"
        )
    else:
        del args["numa-node"]
        notes.append(
            f"--numa-node left out: this machine's layout is unreadable, the published list is not for {count} GPUs"
        )


def _guard_memory(
    args: Args, recipe: Recipe, published_args: Args, gpu: Gpu | None, regime: Regime, notes: list[str]
) -> None:
    """Resolve `mem-fraction-static = "auto"` and cap the pool so that no page offset exceeds int32."""
    asked = args.get("mem-fraction-static")
    if recipe.hardware.gpus == 0 or recipe.model.card is None or args.get("attention-backend") != "aiter":
        if asked == "auto":
            del args["mem-fraction-static"]
            notes.append("--mem-fraction-static left to the engine: the page-offset guard covers only AITER's kernels")
        return
    if gpu is None:
        raise KimiError(
            "cannot compute the memory split of an unknown GPU",
            where="mem-fraction-static = auto",
            remedy="name the GPU with --gpu, or set --set mem-fraction-static=FRACTION",
        )
    plan = make_plan(recipe, args, gpu, regime)
    verdict = plan.verdict
    asked_tokens = int(number(args, "max-total-tokens", verdict.max_total_tokens))
    args["max-total-tokens"] = min(asked_tokens, verdict.max_total_tokens)
    if asked == "auto":
        args["mem-fraction-static"] = verdict.fraction
    elif verdict.binding is None and asked_tokens <= verdict.max_total_tokens:
        del args["max-total-tokens"]  # no cap needed, so the engine sizes its own pool
        return
    notes.append(guard_note(plan, args, published_args.get("mem-fraction-static")))


def guard_note(plan: MemoryPlan, args: Mapping[str, ArgValue], published: ArgValue | None) -> str:
    """Return the guard's verdict as a sentence: arguments, published value, limiting kernel, and gain in tokens."""
    verdict = plan.verdict
    cause = f"weights and KV take at most {verdict.fraction:g} of the memory (options.memory_ceiling)"
    if verdict.binding is not None:
        cause = f"{verdict.binding.name} is correct up to {verdict.limit:,} tokens"
    gain = ""
    if isinstance(published, float):
        more = plan.tokens - plan.sizing.tokens(published)
        gain = f"; {more:+,} tokens over the published {published}"
    return (
        f"{show('mem-fraction-static', args['mem-fraction-static'])} "
        f"{show('max-total-tokens', args['max-total-tokens'])}: page-offset guard for {plan.gpu.name} "
        f"({plan.gpu.hbm_gib:.0f} GiB), AITER {verdict.regime.value}: {cause}{gain}"
    )


def _warn(args: Args, recipe: Recipe, machine: Machine, notes: list[str]) -> None:
    """Add warnings that do not prevent the start."""
    _warn_unpinned(args, recipe, notes)
    gates = read_gates(recipe.environment)
    backend = gates.moe_backend if gates.moe_backend != "auto" else OUR_BACKENDS[0]
    warnings = ignored_gates(gates, backend) + unmet_requirements(recipe, machine)
    if recipe.hardware.gpus and machine.base_problem:
        warnings.append(f"{machine.base_problem.what}; {machine.base_problem.remedy}")
    notes += [f"warning: {text}" for text in warnings]


def _warn_unpinned(args: Args, recipe: Recipe, notes: list[str]) -> None:
    served = {*map(str, args.values()), str(vllm_serve.speculation(args).get("model"))}
    for checkpoint in (recipe.model, recipe.draft):
        # A checkpoint that the command line replaced is not served.
        if checkpoint is not None and checkpoint.repo in served and checkpoint.on_hub and not checkpoint.pinned:
            moving = f"the moving revision {checkpoint.revision!r}; pin a commit hash"
            notes.append(f"warning: {checkpoint.repo} is loaded at {moving}")


def unmet_requirements(recipe: Recipe, machine: Machine) -> list[str]:
    """Return one sentence for each hardware requirement of `recipe` that `machine` does not meet."""
    need = recipe.hardware
    if not need.gpus:
        return []
    if len(machine.devices) < need.gpus:
        return [
            f"this machine has {len(machine.devices)} AMD GPUs, the recipe needs {need.gpus} ({', '.join(need.arch)})"
        ]
    unmet = []
    wrong = sorted({device.arch for device in machine.devices} - set(need.arch))
    if wrong:
        unmet.append(f"the GPUs are {', '.join(wrong)}, the recipe is made for {', '.join(need.arch)}")
    least = min(device.hbm_bytes for device in machine.devices[: need.gpus]) / GIB
    if least < 0.95 * need.hbm_gib:  # the driver keeps a few GiB for itself
        unmet.append(f"a GPU here has {least:.0f} GiB of memory, the recipe is made for {need.hbm_gib:.0f}")
    return unmet


def _reference(recipe: Recipe, notes: list[str]) -> Gpu | None:
    if recipe.hardware.reference is None:
        return None
    gpu = gpu_by_name(recipe.hardware.reference)
    notes.append(
        f"no known GPU found: memory is computed for the recipe's reference GPU, {gpu.name} ({gpu.hbm_gib:.0f} GiB)"
    )
    return gpu


def _path(checkpoint: Checkpoint) -> str:
    """Return the engine's model path: a Hub id, a directory, or the folder of a built-in model."""
    if not checkpoint.repo.startswith("builtin:"):
        return checkpoint.repo

    builders = {"builtin:tiny": "target_path", "builtin:tiny-draft": "draft_path"}
    if checkpoint.repo not in builders:
        raise KimiError(f"unknown built-in model {checkpoint.repo!r}", expected=", ".join(builders))
    return str(getattr(tiny, builders[checkpoint.repo])())

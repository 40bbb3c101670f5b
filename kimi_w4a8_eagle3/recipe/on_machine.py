"""Dependence of a launch on its machine: NUMA list, memory split, missing hardware, known faults of the software.

`launch/known-faults.toml` lists faults of installed packages with the launches that they concern. Conditions on
versions and numbers are Python requirement specifiers, such as `>=0.5.16,<0.5.18` or `>4`. Conditions on the
environment hold for the recipe's variables and for those that the engine inherits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import KimiError
from ..base.files import read_toml
from ..base.finding import Finding, Severity
from ..base.installed import PackageName, operator_dir
from ..base.nearest import nearest
from ..gates import OUR_BACKENDS, ignored_gates, read_gates
from ..machine.aiter_regime import Regime
from ..machine.hardware import GIB, Gpu, Machine, gpu_by_name
from .arguments import Args, number, show
from .memory_plan import MemoryPlan, make_plan, short_pool
from .schema import ArgValue, Recipe

LEAST_HBM = 0.95  # of what the recipe asks for: the driver keeps a few GiB for itself
CORE_LISTS = "SGLANG_SET_CPU_AFFINITY"
# Variables of a recipe's [env] by which it runs code of its own, or takes this package's away.
_LOADERS = {
    "LD_AUDIT": "which loads libraries into every process",
    "LD_LIBRARY_PATH": "which replaces libraries of every process",
    "LD_PRELOAD": "which loads libraries into every process",
    "PYTHONHOME": "which replaces Python's own modules",
    "PYTHONPATH": "which replaces Python modules of the engine",
    "SGLANG_PLUGINS": "which chooses SGLang's plugins, and without this package's there is no secret and no page guard",
}


def fit_to_machine(
    args: Args, recipe: Recipe, published: Args, machine: Machine, gpu: Gpu | None, regime: Regime
) -> list[Finding]:
    """Replace the arguments that depend on the machine, and return the notes on them.

    published: the recipe's arguments before overrides and improvements. gpu: assumed instead of the machine's.
    """
    notes: list[Finding] = []
    notes += _derive_numa(args, published, machine)
    gpu = gpu or machine.gpu
    if gpu is None and recipe.hardware.reference is not None:
        gpu = gpu_by_name(recipe.hardware.reference)
        assumed = f"the recipe's reference GPU, {gpu.name} ({gpu.hbm_gib:.0f} GiB)"
        notes.append(Finding(f"no known GPU found: memory is computed for {assumed}"))
    notes += _guard_memory(args, recipe, published, gpu, regime)
    return notes + [Finding(text, Severity.WARN) for text in _warnings(args, recipe, machine)]


def _derive_numa(args: Args, published_args: Args, machine: Machine) -> list[Finding]:
    if args.get("numa-node") != "auto":
        return []
    published = published_args.get("numa-node")
    count = number(args, "tp-size", 1)
    nodes = machine.numa_nodes  # of all GPUs, because SGLang indexes the list by the GPU's number, not by the rank
    if nodes is not None:
        args["numa-node"] = nodes
        same = ", as published" if nodes == published else ""
        return [Finding(f"{show('numa-node', nodes)}: from this machine's PCI topology{same}")]
    if isinstance(published, list) and len(published) == count:
        args["numa-node"] = published
        reason = "the published list, because this machine's NUMA layout is not readable"
        return [Finding(f"{show('numa-node', published)}: {reason}")]
    del args["numa-node"]
    reason = f"this machine's layout is unreadable, the published list is not for {count} GPUs"
    return [Finding(f"--numa-node left out: {reason}")]


def without_core_lists(
    args: Mapping[str, ArgValue], recipe: Recipe, machine: Machine
) -> tuple[dict[str, str], list[Finding]]:
    """Return the variable that stops SGLang from giving each rank cores of its own, and the note on it.

    The base image asks for them. SGLang then spreads the ranks of one engine over the whole node, and binds each to
    what is left of its socket. That is right only for an engine that has all GPUs of the node.
    """
    node = len(machine.devices) or recipe.hardware.gpus
    ranks = number(args, "tp-size", 1) // number(args, "nnodes", 1)
    if not recipe.hardware.gpus or ranks == node or CORE_LISTS in recipe.env:
        return {}, []
    reason = f"SGLang would spread {ranks} ranks over the cores of all {node} GPUs, which the base image asks for"
    return {CORE_LISTS: "0"}, [Finding(f"env.{CORE_LISTS}=0: {reason}")]


def _guard_memory(args: Args, recipe: Recipe, published_args: Args, gpu: Gpu | None, regime: Regime) -> list[Finding]:
    """Resolve `mem-fraction-static = "auto"` and cap the pool so that no page offset exceeds int32."""
    asked = args.get("mem-fraction-static")
    if recipe.hardware.gpus == 0 or recipe.model.card is None or args.get("attention-backend") != "aiter":
        if asked != "auto":
            return []
        del args["mem-fraction-static"]
        return [Finding("--mem-fraction-static left to the engine: the page-offset guard covers only AITER's kernels")]
    if gpu is None:
        raise KimiError(
            "cannot compute the memory split of an unknown GPU",
            where="mem-fraction-static = auto",
            remedy="name the GPU with --gpu, or set --set mem-fraction-static=FRACTION",
        )
    plan = make_plan(recipe, args, gpu, regime)
    verdict = plan.verdict
    short = [Finding(text, Severity.WARN)] if (text := short_pool(plan, args)) else []
    asked_tokens = number(args, "max-total-tokens", verdict.max_total_tokens)
    args["max-total-tokens"] = min(asked_tokens, verdict.max_total_tokens)
    if asked == "auto":
        args["mem-fraction-static"] = verdict.fraction
    elif verdict.binding is None and asked_tokens <= verdict.max_total_tokens:
        del args["max-total-tokens"]  # no cap needed, so the engine sizes its own pool
        return short
    return [*short, Finding(_guard_sentence(plan, args, published_args.get("mem-fraction-static")))]


def _guard_sentence(plan: MemoryPlan, args: Mapping[str, ArgValue], published: ArgValue | None) -> str:
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


def _warnings(args: Args, recipe: Recipe, machine: Machine) -> Iterator[str]:
    """Yield what does not prevent the start."""
    served = set(map(str, args.values()))
    for checkpoint in recipe.checkpoints:
        # A checkpoint that the command line replaced is not served.
        if checkpoint.repo in served and checkpoint.on_hub and not checkpoint.pinned:
            yield f"{checkpoint.repo} is loaded at the moving revision {checkpoint.revision!r}; pin a commit hash"
    environment = recipe.environment
    for name in sorted(environment.keys() & _LOADERS.keys()):
        yield f"the recipe sets {name}={environment[name]}, {_LOADERS[name]}: a recipe is trusted as code"
    gates = read_gates(environment)
    yield from ignored_gates(gates, gates.moe_backend if gates.moe_backend != "auto" else OUR_BACKENDS[0])
    yield from unmet_requirements(recipe, machine)
    if recipe.hardware.gpus and machine.base_problem:
        yield f"{machine.base_problem.what}; {machine.base_problem.remedy}"


def unmet_requirements(recipe: Recipe, machine: Machine) -> list[str]:
    """Return one sentence for each hardware requirement of `recipe` that `machine` does not meet."""
    need = recipe.hardware
    if not need.gpus:
        return [] if which("lscpu") else ["SGLang runs the program lscpu on a CPU: apt-get install util-linux"]
    if len(machine.devices) < need.gpus:
        return [
            f"this machine has {len(machine.devices)} AMD GPUs, the recipe needs {need.gpus} ({', '.join(need.arch)})"
        ]
    unmet = list(filter(None, [missing_gpus(recipe, machine)]))
    wrong = sorted({device.arch for device in machine.devices} - set(need.arch))
    if wrong:
        unmet.append(f"the GPUs are {', '.join(wrong)}, the recipe is made for {', '.join(need.arch)}")
    least = min(device.hbm_bytes for device in machine.devices[: need.gpus]) / GIB
    if least < LEAST_HBM * need.hbm_gib:
        unmet.append(f"a GPU here has {least:.0f} GiB of memory, the recipe is made for {need.hbm_gib:.0f}")
    return unmet


def missing_gpus(recipe: Recipe, machine: Machine) -> str | None:
    """Return a sentence if the engine needs more GPUs than this machine, or without any the recipe's, has."""
    here = number(recipe.args, "tp-size", 1) // number(recipe.args, "nnodes", 1)
    have, owner = (len(machine.devices), "this") if machine.devices else (recipe.hardware.gpus, "the recipe's")
    return None if here <= have else f"an engine needs {here} GPUs, {owner} machine has {have}"


_COMPARES = ("<", ">", "=", "!", "~")


def _comparable(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"{text!r} compares nothing") from None
    return text


Specifier = Annotated[str, AfterValidator(_comparable)]
_One = Annotated[str, AfterValidator(lambda text: _comparable(text) if text[:1] in _COMPARES else text)]
Condition = bool | _One | list[_One]


class Fault(BaseModel):
    """One fault: its conditions, its effect, its report and its remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    verdict: Literal["refuse", "warn", "note", "set"]
    installed: dict[PackageName, Specifier] = {}
    tried: dict[PackageName, list[Specifier]] = {}
    arch: list[str] = []
    args: dict[str, Condition] = {}
    env: dict[str, Condition] = {}
    set: dict[str, ArgValue] = {}
    what: str = Field(min_length=10)
    link: str = Field(pattern="^https://")
    remedy: str = Field(min_length=5)

    @property
    def severity(self) -> Severity:
        return {"refuse": Severity.FAIL, "note": Severity.NOTE}.get(self.verdict, Severity.WARN)

    @property
    def sentence(self) -> str:
        """The fault and its link, as shown to the user."""
        return f"{self.what} ({self.link})"

    def concerns(
        self, args: Mapping[str, ArgValue], env: Mapping[str, str], arch: str | None, installed: Mapping[str, str]
    ) -> bool:
        """True if all conditions hold and, for `set`, an argument differs from its required value."""
        return (
            all(name in installed and _compares(text, installed[name]) for name, text in self.installed.items())
            and not any(_compares(text, installed.get(name, "")) for name in self.tried for text in self.tried[name])
            and (not self.arch or arch in self.arch)
            and all(_holds(condition, args.get(name)) for name, condition in self.args.items())
            and all(_holds(condition, env.get(name)) for name, condition in self.env.items())
            and (not self.set or any(args.get(name) != value for name, value in self.set.items()))
        )


@cache
def known_faults(path: Path | None = None) -> tuple[Fault, ...]:
    """Load the table; raise KimiError for a mistake in it."""
    path = path or operator_dir("launch") / "known-faults.toml"
    try:
        return tuple(Fault(id=name, **entry) for name, entry in read_toml(path).items())
    except (ValidationError, TypeError) as error:
        raise KimiError(f"cannot read the table of known faults: {error}", where=str(path)) from None


def concerning(
    args: Mapping[str, ArgValue], env: Mapping[str, str], arch: str | None, installed: Mapping[str, str]
) -> list[Fault]:
    """Return the known faults of a launch on `arch` with the `installed` versions, in the table's order."""
    return [fault for fault in known_faults() if fault.concerns(args, env, arch, installed)]


def apply_faults(faults: Sequence[Fault], args: Args, accepted: Sequence[str], notes: list[Finding]) -> list[Fault]:
    """Set arguments and add warnings; return the faults that refuse. `accepted`: ids that the operator accepts."""
    ids = [fault.id for fault in known_faults()]
    if unknown := [fault for fault in accepted if fault not in ids]:
        what = f"no known fault is called {unknown[0]!r}{nearest(unknown[0], ids)}"
        raise KimiError(what, where="options.accept_faults", expected=", ".join(ids))
    refused = []
    for fault in faults:
        if fault.id in accepted:
            notes.append(Finding(f"the known fault {fault.id} is accepted: {fault.sentence}", Severity.OVERRIDE))
        elif fault.set and not set(fault.set) & set(args):
            args.update(fault.set)
            notes += [Finding(f"{show(name, value)}: {fault.sentence}") for name, value in fault.set.items()]
        else:
            refused += [fault] if fault.severity is Severity.FAIL else []
            notes.append(Finding(f"{fault.sentence}; {fault.remedy}", fault.severity))
    return refused


def _holds(condition: bool | str | list[str], value: Any) -> bool:
    if isinstance(condition, list):
        return any(_holds(one, value) for one in condition)
    given = value is not None and value is not False
    if isinstance(condition, bool) or not given:
        return condition is given
    return _compares(condition, str(value)) if condition[:1] in _COMPARES else str(value) == condition


def _compares(specifier: str, text: str) -> bool:
    """True if the version or number satisfies the specifier; an unreadable version satisfies none."""
    try:
        return SpecifierSet(specifier).contains(Version(text), prereleases=True)
    except InvalidVersion:
        return False

"""Recipe schema: model, draft, engine arguments and environment, read from `launch/recipes/*.toml` and checked.

`[args]` holds the published command. `[improve]` holds this package's changes with their reasons, so that every
difference from the published command is explained in place. `launch.render` turns a recipe into a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..base.errors import KimiError, UsageError
from ..base.files import read_toml
from ..base.installed import operator_dir
from ..base.nearest import nearest

ArgValue = bool | int | float | str | list[int] | list[float] | list[str]
MAX_EXTENDS = 8
PLAIN = ":plain"  # suffix of a recipe's name: without its draft
_ENV = "env."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeCheckpoint(_Strict):
    """A model on the Hub (`owner/name`), a local directory, or `builtin:<name>`."""

    repo: str
    revision: str = "main"
    card: str | None = Field(default=None, description="architecture facts in launch/models/<card>.json")
    sha256: str = Field(default="", description="of config and weights; `check` and `draft train` print it")
    answers: str = Field(default="", description="file of `kimi-w4a8 check --record`, or its name in launch/answers")

    @property
    def pinned(self) -> bool:
        """True if the revision is a full commit hash, so that every download gives the same bytes."""
        return len(self.revision) == 40 and all(c in "0123456789abcdef" for c in self.revision)

    @property
    def on_hub(self) -> bool:
        """True for `owner/name`; False for a directory or a built-in model."""
        return not self.repo.startswith(("builtin:", "/", ".", "~"))

    @property
    def named_revision(self) -> dict[str, str]:
        """{"revision": ...} for a repository on the Hub, except for `main`, which engines take by default."""
        return {"revision": self.revision} if self.on_hub and self.revision != "main" else {}


class Improvement(_Strict):
    """Argument or variable (`env.NAME`) that differs from the published command, with the reason."""

    value: ArgValue
    why: str = Field(min_length=10)


class Options(_Strict):
    """Choices that become engine arguments."""

    speculation: Literal["off", "fixed"] = "fixed"
    # Seconds without a token, while requests run, after which an engine counts as hung.
    progress_timeout_s: float = Field(default=900, gt=0)
    # Seconds without an answer from the scheduler after which the engine takes no new requests. The scheduler loops
    # once per forward pass, and the longest pass is one prefill chunk.
    unready_after_s: float = Field(default=20, gt=0)
    memory_ceiling: float = Field(default=0.90, gt=0, lt=1, description="most of a GPU for weights and KV together")
    least_accept_length: float = Field(
        default=1, ge=1, description="accept length at or below which the canary takes an engine out"
    )
    accept_faults: list[str] = Field(default=[], description="known faults that do not stop this launch")


class Hardware(_Strict):
    """Hardware requirements; `gpus = 0` runs on a CPU."""

    arch: list[str] = []
    gpus: int = Field(default=0, ge=0)
    hbm_gib: float = Field(default=0, ge=0)
    reference: str | None = Field(default=None, description="GPU assumed by --dry-run and `kimi-w4a8 plan` without one")
    verified: list[str] = Field(default=[], description="GPUs on which `kimi-w4a8 accept` has passed, or cpu")


def _scalar_to_text(value: Any) -> Any:
    """Convert an environment value to text; `false` removes an inherited variable."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


EnvValue = Annotated[str | Literal[False], BeforeValidator(_scalar_to_text)]


class Recipe(_Strict):
    """One way to serve the model, fully resolved (no `extends` left)."""

    name: str
    summary: str
    model: RecipeCheckpoint
    draft: RecipeCheckpoint | None = None
    args: dict[str, ArgValue] = {}
    improve: dict[str, Improvement] = {}
    options: Options = Options()
    env: dict[str, EnvValue] = {}
    hardware: Hardware = Hardware()

    @property
    def checkpoints(self) -> list[RecipeCheckpoint]:
        """The target, and the draft if there is one."""
        return [self.model, self.draft] if self.draft else [self.model]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine."""
        changes = {name: change for name, change in self.improve.items() if name.startswith(_ENV)}
        improved = {name[len(_ENV) :]: str(change.value) for name, change in changes.items()}
        return {name: value for name, value in self.env.items() if value is not False} | improved

    @property
    def improved_args(self) -> dict[str, Improvement]:
        """This package's changes of engine arguments."""
        return {name: change for name, change in self.improve.items() if not name.startswith(_ENV)}

    @property
    def final_args(self) -> dict[str, ArgValue]:
        """The engine arguments with these changes, before those for a machine."""
        return self.args | {name: change.value for name, change in self.improved_args.items()}


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in operator_dir("launch/recipes").glob("*.toml"))


def one_recipe(named: str | None, option: str | None, default: str | None = None) -> str:
    """Return the recipe given as RECIPE or by --recipe; raise UsageError for both, or for neither without a default."""
    if named and option:
        raise UsageError("two recipes were given", where=f"{named}, --recipe {option}", remedy="remove one of them")
    if found := named or option:
        return found
    if default is None:
        raise UsageError("no recipe was named", expected=f"one of {', '.join(recipe_names())}; or a TOML file")
    return default


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe by name (`agent`) or from a TOML file; `agent:plain` is `agent` with options.speculation = "off".

    Raises KimiError for an unknown name, invalid TOML, an unknown key (with the nearest valid one) or a bad value.
    """
    name, colon, variant = str(name_or_path).rpartition(":")
    if not colon or "/" in variant:
        path = _find(str(name_or_path))
        return _validated(path.stem, _resolve(path, depth=0), str(path))
    recipe = load_recipe(name)
    if variant != PLAIN[1:]:
        raise UsageError(
            f"unknown suffix {variant!r} of the recipe {name!r}",
            where=str(name_or_path),
            expected=f"{name}, or {name}{PLAIN} (without its draft)",
        )
    recipe = with_settings(recipe, {"options.speculation": "off"})
    return recipe.model_copy(update={"name": f"{recipe.name}{PLAIN}"})


def with_settings(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """Return `recipe` with dotted keys replaced, such as `{"options.speculation": "off", "args.port": 8000}`.

    A setting also replaces an improvement of the same name. Raises the errors of `load_recipe`.
    """
    table = recipe.model_dump(exclude={"name"}, exclude_none=True)
    for key, value in sorted(settings.items(), key=lambda setting: not setting[0].endswith(".repo")):
        section, _, rest = key.partition(".")
        if not rest:
            raise UsageError(f"setting {key!r} has no section", where="--set", expected="SECTION.KEY=VALUE")
        if section in ("args", "env"):
            table["improve"].pop(key.removeprefix("args."), None)
            table[section][rest] = value
        else:
            table = _merge(table, _nested(key.split("."), value))
    return _validated(recipe.name, table, "--set", UsageError)


def _validated(name: str, table: dict[str, Any], where: str, kind: type[KimiError] = KimiError) -> Recipe:
    try:
        recipe = Recipe.model_validate({"name": name, **table})
    except ValidationError as error:
        raise _explain(error, where, kind) from None
    return _without_draft(recipe) if recipe.options.speculation == "off" else recipe


def _without_draft(recipe: Recipe) -> Recipe:
    def kept(table: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if not name.startswith("speculative-")}

    return recipe.model_copy(update={"draft": None, "args": kept(recipe.args), "improve": kept(recipe.improve)})


def _find(name: str, where: str = "--recipe") -> Path:
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UsageError(f"no recipe file {name}", where, expected="a TOML file or a recipe name")
        return path
    names = recipe_names()
    if name not in names:
        raise UsageError(f"unknown recipe {name!r}{nearest(name, names)}", where, expected=", ".join(names))
    return operator_dir("launch/recipes") / f"{name}.toml"


def _resolve(path: Path, depth: int) -> dict[str, Any]:
    """Merge the file's table over the table it extends, which is looked up beside it and then in the package."""
    if depth > MAX_EXTENDS:
        raise KimiError("recipes extend each other in a circle", where=str(path))
    table = read_toml(path)
    parent_name = table.pop("extends", None)
    if parent_name is None:
        return table
    if not isinstance(parent_name, str):
        raise KimiError("`extends` must be a recipe name", where=str(path), expected='extends = "w4a8"')
    beside = path.parent / f"{parent_name.removesuffix('.toml')}.toml"
    parent = _resolve(beside if beside.is_file() else _find(parent_name, f"{path}, extends"), depth + 1)
    parent.pop("summary", None)
    parent.get("hardware", {}).pop("verified", None)
    for name in (*table.get("args", {}), *(_ENV + name for name in table.get("env", {}))):  # replace its improvements
        parent.get("improve", {}).pop(name, None)
    return _merge(parent, table)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge tables key by key and replace everything else. What is known of a repository is not of another one."""
    merged = {key: value for key, value in base.items() if "repo" not in over or key not in ("sha256", "answers")}
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: value if len(keys) == 1 else _nested(keys[1:], value)}


def _explain(error: ValidationError, where: str, kind: type[KimiError]) -> KimiError:
    """Return the first error of a pydantic report as one sentence."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    dotted = ".".join(location)
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(location[:-1])
        return kind(
            f"unknown key {dotted!r}{nearest(location[-1], valid)}", where=where, expected="one of " + ", ".join(valid)
        )
    if first["type"] == "missing":
        return kind(f"the key {dotted!r} is missing", where=where)
    return kind(f"{dotted}: {first['msg']}", where=where, expected=str(first.get("ctx", {}).get("expected", "")))


def _valid_keys(parents: list[str]) -> list[str]:
    if not parents:
        return [*(name for name in Recipe.model_fields if name != "name"), "extends"]
    kind = Recipe.model_fields[parents[0]].annotation  # a model, an optional model, or a table of models
    models = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
    return list(models[0].model_fields)

"""The vLLM side of a recipe: its arguments, its command, and the container that the published figures come from.

Options and their meaning were read from vLLM 0.19.0. `speculative-config` is a table in the recipe's `[args]`; the
draft's name is added here, so that it stands in one place (`[draft]`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import KimiError
from .arguments import Args, argument_groups, command_words
from .schema import ArgValue, Recipe

SPECULATIVE = "speculative-config"
DEFAULT_PORT = 8000
MODELS_IN_CONTAINER = "/models"


def assemble(recipe: Recipe, notes: list[str]) -> Args:
    """The recipe's arguments with the draft in `speculative-config`; what this package changes comes afterwards."""
    args: Args = {"model": recipe.model.repo}
    if recipe.model.on_hub and recipe.model.revision != "main":
        args["revision"] = recipe.model.revision
    args.update(recipe.args)
    if recipe.draft is not None and SPECULATIVE in args:
        args[SPECULATIVE] = _with_draft(speculation(args), recipe)
    return args


def speculation(args: Mapping[str, ArgValue]) -> dict[str, Any]:
    """`speculative-config` as a table, whether a recipe wrote it or a person typed JSON; {} without speculation."""
    value = args.get(SPECULATIVE)
    if value is None or value is False:
        return {}
    try:
        table = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        table, problem = None, str(error)
    else:
        problem = f"it is a {type(table).__name__}"
    if not isinstance(table, dict):
        raise KimiError(f"--{SPECULATIVE} cannot be read: {problem}", expected='JSON: {"method": "eagle3", ...}')
    return table


def command(args: Mapping[str, ArgValue]) -> list[str]:
    """`vllm serve MODEL --name value ...`."""
    options = {name: value for name, value in args.items() if name != "model"}
    return ["vllm", "serve", str(args["model"]), *command_words(options)]


def docker_run(image: str, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The same command in `image`, as lines that a shell runs; downloaded models stay on the host.

    The entry point is named, because images differ in theirs.
    """
    program, *arguments = argv
    options = [
        "docker run --rm -it",
        "--device /dev/kfd --device /dev/dri --group-add video",
        "--ipc host --shm-size 16g --network host",
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{MODELS_IN_CONTAINER}"',
        f"-e HF_HOME={MODELS_IN_CONTAINER} -e HF_TOKEN",
        *(f"-e {name}={shlex.quote(value)}" for name, value in env.items()),
        f"--entrypoint {program} {image}",
    ]
    return " \\\n    ".join([*options, *argument_groups([shlex.quote(word) for word in arguments])])


def _with_draft(table: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    assert recipe.draft is not None
    named: dict[str, Any] = {"model": recipe.draft.repo}
    if recipe.draft.on_hub and recipe.draft.revision != "main":
        named["revision"] = recipe.draft.revision
    return {**named, **table}

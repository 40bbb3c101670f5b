"""vLLM side of a recipe: arguments, command, and the container of the published figures.

Options and their meaning come from vLLM 0.19.0. `speculative-config` is a table in the recipe's `[args]`. The draft's
name is added here, so that only `[draft]` states it.
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


def assemble(recipe: Recipe) -> Args:
    """Return the recipe's arguments with the draft in `speculative-config`, before this package's changes."""
    args: Args = {"model": recipe.model.repo, **recipe.model.named_revision, **recipe.args}
    if recipe.draft is not None and SPECULATIVE in args:
        args[SPECULATIVE] = {"model": recipe.draft.repo, **recipe.draft.named_revision, **speculation(args)}
    return args


def speculation(args: Mapping[str, ArgValue]) -> dict[str, Any]:
    """Return `speculative-config` as a table, from a recipe's table or typed JSON; {} without speculation."""
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
        raise KimiError(f"cannot read --{SPECULATIVE}: {problem}", expected='JSON: {"method": "eagle3", ...}')
    return table


def command(args: Mapping[str, ArgValue]) -> list[str]:
    """Return `vllm serve MODEL --name value ...`."""
    options = {name: value for name, value in args.items() if name != "model"}
    return ["vllm", "serve", str(args["model"]), *command_words(options)]


def docker_run(image: str, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the command in `image` as shell lines; downloaded models stay on the host.

    The entry point is explicit, because images differ in theirs.
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

"""SGLang's load generator, which also reports each finished request, its prompt, and the prompt length of each turn.

Beside its output, `.prompts` gets the prompt of each request that is sent, and `.progress` the number of output tokens
of each one that is finished, both with the warm-up. The generator counts cached tokens per turn, but a prompt that
contains an earlier answer has no known length. The server reports it in the usage of each turn, which `note` reads.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sglang.benchmark import serving

_count_cached = serving._extract_cache_from_sglext


def note(data: dict[str, Any], output: Any) -> None:
    """Take the cached tokens from a piece of the stream as SGLang does, and the prompt's length."""
    _count_cached(data, output)
    if usage := data.get("usage"):
        output.prompt_len = usage["prompt_tokens"]


def reported(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the request function, which also writes both files."""

    async def send(request_func_input: Any, pbar: Any = None) -> Any:
        beside = Path(serving.args.output_file)
        with beside.with_suffix(".prompts").open("a") as file:
            sent = {"prompt": request_func_input.prompt, "prompt_len": request_func_input.prompt_len}
            file.write(json.dumps(sent) + "\n")
        output = await request(request_func_input=request_func_input, pbar=pbar)
        with beside.with_suffix(".progress").open("a") as file:
            file.write(f"{output.output_len if output.success else 0}\n")
        return output

    return send


if __name__ == "__main__":
    serving._extract_cache_from_sglext = note
    serving.ASYNC_REQUEST_FUNCS = {name: reported(send) for name, send in serving.ASYNC_REQUEST_FUNCS.items()}
    serving.cli_main()

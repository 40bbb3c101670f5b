"""SGLang's load generator, which also reports each finished request, its prompt, and the prompt length of each turn.

Beside its output, `.prompts` gets the prompt of each request that is sent, and `.progress` the number of output tokens
of each one that is finished, both with the warm-up. The generator counts cached tokens per turn, but a prompt that
contains an earlier answer has no known length. The server reports it in the usage of each turn, which `note` reads.

`.warmups` has the number of warm-up requests, and exists until `kimi-w4a8 bench` has read the server's counters. Until
then the last of them does not return, and SGLang's program sends no measured request.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from sglang.benchmark import serving

from kimi_w4a8_lab.speed.generator import INCREMENTAL

_MOST_WAIT_S = 60.0  # longer than bench waits for the counters; ends the wait when bench was killed
_without_prefix = serving.remove_prefix
_count_cached = serving._extract_cache_from_sglext


def data_of(line: str, prefix: str) -> str:
    """Return the data of a line of a stream. A comment, by which a server says that it works, is like the last line."""
    return "[DONE]" if line.startswith(":") else _without_prefix(line, prefix)


def note(data: dict[str, Any], output: Any) -> None:
    """Take the cached tokens from a piece of the stream as SGLang does, and the prompt's length."""
    _count_cached(data, output)
    if usage := data.get("usage"):
        output.prompt_len = usage["prompt_tokens"]


def reported(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the request function, which also writes both files and waits at the end of the warm-up."""

    async def send(request_func_input: Any, pbar: Any = None) -> Any:
        beside = Path(serving.args.output_file)
        with beside.with_suffix(".prompts").open("a") as file:
            sent = {"prompt": request_func_input.prompt, "prompt_len": request_func_input.prompt_len}
            file.write(json.dumps(sent) + "\n")
        output = await request(request_func_input=request_func_input, pbar=pbar)
        with beside.with_suffix(".progress").open("a") as file:
            file.write(f"{output.output_len if output.success else 0}\n")
        await WARMUP.ended(beside.with_suffix(".warmups"))
        return output

    return send


@dataclass
class Warmup:
    finished: int = 0

    async def ended(self, path: Path) -> None:
        """Count a request that ended. After the last one of the warm-up, wait until `path` is gone."""
        self.finished += 1
        with suppress(FileNotFoundError):
            end = time.monotonic() + _MOST_WAIT_S
            while self.finished == int(path.read_text()) and time.monotonic() < end:
                await asyncio.sleep(0.02)


WARMUP = Warmup()


class WholeTexts:
    """orjson for an engine whose streams send what is new: the generator expects each event to repeat the text."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def loads(self, data: bytes) -> Any:
        event = orjson.loads(data)
        if "text" in event and (request := (event.get("meta_info") or {}).get("id")):
            self._texts[request] = event["text"] = self._texts.get(request, "") + event["text"]
        return event

    def __getattr__(self, name: str) -> Any:
        return getattr(orjson, name)


if __name__ == "__main__":
    if os.environ.get(INCREMENTAL):
        serving.orjson = WholeTexts()
    serving._extract_cache_from_sglext, serving.remove_prefix = note, data_of
    serving.ASYNC_REQUEST_FUNCS = {name: reported(send) for name, send in serving.ASYNC_REQUEST_FUNCS.items()}
    serving.cli_main()

"""SGLang's load generator, which also reports each finished request, its prompt, and the prompt length of each turn.

Beside its output, `.prompts` gets the prompt of each request that is sent, and `.progress` the number of output tokens
of each one that is finished, both with the warm-up. The generator counts cached tokens per turn, but a prompt that
contains an earlier answer has no known length. The server reports it in the usage of each turn, which `note` reads.

Turns of a recorded trace are sent by `speed/sent_turns.py`. `.requests` gets the times of each.

`.warmups` has the number of warm-up requests, and exists until `kimi-w4a8 bench` has read the server's counters. Until
then the last of them does not return, and SGLang's program sends no measured request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.benchmark import serving

from ..speed.sent_turns import CHAT, ROLE, Recorded, Sender, Sent, TextMaker

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
        if turns := recorded_turns(request_func_input.prompt):
            output = await RECORDED.send(turns, request_func_input, beside.with_suffix(".requests"))
        else:
            with beside.with_suffix(".prompts").open("a") as file:
                sent = {"prompt": request_func_input.prompt, "prompt_len": request_func_input.prompt_len}
                file.write(json.dumps(sent) + "\n")
            output = await request(request_func_input=request_func_input, pbar=pbar)
        with beside.with_suffix(".progress").open("a") as file:
            file.write(f"{output.output_len if output.success else 0}\n")
        await WARMUP.ended(beside.with_suffix(".warmups"))
        return output

    return send


def recorded_turns(prompt: Any) -> list[Recorded]:
    """Return a session's turns so far; none for other prompts. SGLang puts the answers between them."""
    found = [message["content"] for message in prompt if message["role"] == ROLE] if isinstance(prompt, list) else []
    return [Recorded(**content) for content in found]


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


@dataclass
class RecordedTurns:
    """The sender of this process, made at the first turn, when the tokenizer and the server are known."""

    tokenizer: Any = None
    sender: Sender | None = None

    def keep(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loader of the tokenizer, which also keeps it here."""

        def loaded(*args: Any, **options: Any) -> Any:
            self.tokenizer = load(*args, **options)
            return self.tokenizer

        return loaded

    async def send(self, turns: list[Recorded], asked: Any, path: Path) -> Any:
        """Send the last turn, append its times to `path`, and return SGLang's form of the result."""
        if self.sender is None:
            base_url, users = asked.api_url.removesuffix(CHAT), int(asked.extra_request_body["users"])
            texts = TextMaker(self.tokenizer)
            self.sender = Sender(base_url, asked.model, users, serving.get_request_headers(), texts)
        found: Sent = await self.sender.send(turns)
        with path.open("a") as file:
            file.write(json.dumps(found.times()) + "\n")
        return serving.RequestFuncOutput(
            generated_text="".join(found.pieces),
            success=not found.error,
            latency=found.latency,
            ttft=found.ttft,
            itl=found.gaps,
            text_chunks=found.pieces,
            prompt_len=found.prompt_tokens,
            error=found.error,
            output_len=found.output_tokens,
            start_time=self.sender.start + found.sent_s,
            cached_tokens=found.cached_tokens,
        )


RECORDED = RecordedTurns()
WARMUP = Warmup()


if __name__ == "__main__":
    serving._extract_cache_from_sglext, serving.remove_prefix = note, data_of
    serving.get_tokenizer = RECORDED.keep(serving.get_tokenizer)
    serving.ASYNC_REQUEST_FUNCS = {name: reported(send) for name, send in serving.ASYNC_REQUEST_FUNCS.items()}
    serving.cli_main()

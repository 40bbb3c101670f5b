"""SGLang's load generator (`sglang.benchmark.serving`), run as a process, and its output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import Program, last_line, start_program

from ..base.first_error import first_error

# SGLang's program, which also writes a line for each finished request.
_GENERATOR = "kimi_w4a8_lab.with_sglang.bench_generator"
_POLL_S = 0.1
ShowTokens = Callable[[int, int], None]  # finished requests and their output tokens
INCREMENTAL = "KIMI_INCREMENTAL"  # set where an engine's streams send what is new alone
_TIMEOUT_S = 7200.0

Content = TypeVar("Content", bound=BaseModel)


class LoadResult(BaseModel):
    """One line of the generator's JSONL: times in ms, throughput in tok/s.

    `total_output_tokens` comes from the server's usage, so it is correct under speculation, where one streamed chunk
    holds several tokens. The generator's own accept length is the server's average since its start and is not kept.
    """

    model_config = ConfigDict(extra="ignore")

    max_concurrency: int | None
    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    p99_itl_ms: float


class LoadDetails(BaseModel):
    """Per-request details in the order sent (`--output-details`): lengths in tokens, times in seconds.

    `itls[i]` holds the gaps between the tokens of request i. A gap that brought several tokens is divided by their
    number, except in chats. cached_tokens: for conversations, the prompt tokens from the prefix cache, user by user,
    turn by turn.
    """

    model_config = ConfigDict(extra="ignore")

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    generated_texts: list[str]
    errors: list[str]
    cached_tokens: list[int] = []


def generator_program(base_url: str, arguments: Sequence[str], output: Path) -> Program:
    return Program(_GENERATOR, ("--base-url", base_url, "--output-file", str(output), *arguments))


def drive(
    base_url: str,
    arguments: Sequence[str],
    output: Path,
    warmups: int,
    on_measured: Callable[[int], None],
    show: ShowTokens,
    api_key: str | None = None,
    incremental: bool = False,
) -> None:
    """Run the generator to its end; its output goes to `output` with the suffix `.log`.

    on_measured is called after `warmups` requests with the number of answered ones. The measured ones wait for its end.
    show is called with the measured requests that are finished, and their tokens.
    incremental: the events of the server's streams hold what is new alone.
    api_key is passed as OPENAI_API_KEY, so it appears in no command line or log. Raises KimiError when the generator
    fails, is killed or takes longer than two hours.
    """
    program, log = generator_program(base_url, arguments, output), output.with_suffix(".log")
    held = output.with_suffix(".warmups")
    held.write_text(str(warmups))
    # Offline, because only a tokenizer on this disk was checked (`require_trusted_tokenizer`). Nothing needs compiling.
    changes = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    changes |= {} if api_key is None else {"OPENAI_API_KEY": api_key}
    changes |= {INCREMENTAL: "1"} if incremental else {}
    deadline = time.monotonic() + _TIMEOUT_S
    with log.open("ab") as file:
        process = start_program(program, changes, file.fileno())
    waiting: Callable[[int], None] | None = on_measured
    try:
        while process.poll() is None:
            tokens = _finished(output.with_suffix(".progress"))
            if waiting is not None and len(tokens) >= warmups:
                waiting(sum(count > 0 for count in tokens[:warmups]))
                waiting = None
                held.unlink()
            show(len(tokens[warmups:]), sum(tokens[warmups:]))
            if time.monotonic() > deadline:
                raise KimiError(f"the load generator did not finish within {_TIMEOUT_S:.0f} s", where=str(log))
            time.sleep(_POLL_S)
    finally:
        held.unlink(missing_ok=True)
        if process.poll() is None:
            process.kill()
            process.wait()
    if (code := process.wait()) != 0:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise KimiError(
            f"the load generator ended with {how}: {last_line(log)}",
            where=str(log),
            remedy="read this log; if the generator could not connect, read the server's log",
        )


def _finished(path: Path) -> list[int]:
    """Return the output tokens of each finished request."""
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [int(line) for line in lines]


def read_last(path: Path, kind: type[Content]) -> Content:
    """Read the last line of a result file as `LoadResult` or `LoadDetails`.

    Raises KimiError for a missing file, a cut line or a missing figure.
    """
    line = last_json_line(path)
    try:
        return kind.model_validate(json.loads(line))
    except (json.JSONDecodeError, ValidationError) as error:
        detail = first_error(error) if isinstance(error, ValidationError) else error
        raise KimiError(
            f"cannot read the load generator's result: {detail}",
            where=str(path),
            expected="one JSON object per line, as sglang.bench_serving writes it",
            remedy="the run was interrupted or the disk is full: free space and measure again",
        ) from error


def last_json_line(path: Path) -> str:
    """Return the last non-empty line of a JSONL file; raise KimiError if there is none."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise KimiError(f"the load generator wrote no result: {error.strerror}", where=str(path)) from error
    if not lines:
        raise KimiError("the load generator wrote an empty result", where=str(path))
    return lines[-1]

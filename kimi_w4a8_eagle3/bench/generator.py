"""Run `sglang.benchmark.serving` as a process against a running server and read what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..base.errors import KimiError
from ..engine.fork_server import PROGRAM, ForkedProcess, fork_beside
from ..engine.process import last_line
from .workloads import AGENT_DATASET

_GENERATOR = "sglang.benchmark.serving"
# The same, which also records how long the prompt of each turn of a conversation was.
_WITH_TURNS = "kimi_w4a8_eagle3.sglang_plugin.bench_turns"
# What the generator prints between its warm-up and the measured requests.
_WARMED_UP = b"Starting main benchmark run"
_POLL_S = 0.1
_TIMEOUT_S = 7200.0

Content = TypeVar("Content", bound=BaseModel)


class LoadResult(BaseModel):
    """One line of the generator's JSONL: times in ms, throughput in tok/s.

    `total_output_tokens` counts what the server reports as usage, so it is right under speculation, where a streamed
    chunk holds several tokens. The generator's own accept length is the server's average since start and is not kept.
    """

    model_config = ConfigDict(extra="ignore")

    max_concurrency: int | None
    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    p99_itl_ms: float
    mean_e2e_latency_ms: float
    median_e2e_latency_ms: float
    p99_e2e_latency_ms: float


class LoadDetails(BaseModel):
    """Per request, in the order sent: lengths in tokens, times in seconds (`--output-details`).

    `itls[i]` holds the gaps between the tokens of request i; a gap that brought several tokens is divided by them,
    but that of a chat is whole.
    cached_tokens: of conversations, found in the prefix cache; their requests stand user by user, turn by turn.
    """

    model_config = ConfigDict(extra="ignore")

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    generated_texts: list[str]
    errors: list[str]
    cached_tokens: list[int] = []


def write_conversations(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write (user, assistant) pairs in the format of the generator's `custom` dataset."""
    lines = (json.dumps({"conversations": [{"content": user}, {"content": answer}]}) for user, answer in pairs)
    path.write_text("\n".join(lines) + "\n")


def generator_command(base_url: str, arguments: Sequence[str], output: Path) -> list[str]:
    """The load generator's command line: SGLang's own program, unchanged but for conversations."""
    program = [sys.executable, *PROGRAM, _WITH_TURNS if AGENT_DATASET[1] in arguments else _GENERATOR]
    return [*program, "--base-url", base_url, "--output-file", str(output), *arguments]


def drive(
    base_url: str,
    arguments: Sequence[str],
    output: Path,
    on_measured: Callable[[], None],
    api_key: str | None = None,
) -> None:
    """Run the generator to its end; what it prints goes to `output` with the suffix `.log`.

    on_measured is called when the warm-up is over and the measured requests are about to be sent: the generator
    pauses for a second there. api_key: reaches it by OPENAI_API_KEY and is therefore in no command line or log. Raises
    KimiError when it fails, is killed or takes longer than two hours.
    """
    command, log = generator_command(base_url, arguments, output), output.with_suffix(".log")
    key = {} if api_key is None else {"OPENAI_API_KEY": api_key}
    deadline = time.monotonic() + _TIMEOUT_S
    with log.open("ab") as file:
        began = file.tell()
        process = start_program(command, key, file)
    waiting: Callable[[], None] | None = on_measured
    try:
        while process.poll() is None:
            if waiting is not None and _WARMED_UP in _appended(log, began):
                waiting()
                waiting = None
            if time.monotonic() > deadline:
                raise KimiError(f"the load generator did not finish within {_TIMEOUT_S:.0f} s", where=str(log))
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if (code := process.wait()) != 0:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise KimiError(
            f"the load generator ended with {how}: {last_line(log)}",
            where=str(log),
            remedy="its log has the details; if it cannot connect, the server's log says why it stopped",
        )


def start_program(
    command: Sequence[str], key: Mapping[str, str], log: BinaryIO
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Begin a program that measures engines: where this process forks them, one of SGLang's imports nothing anew."""
    # Offline: a tokenizer's code was checked on this disk (`require_trusted_tokenizer`). And it compiles nothing.
    changes = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", **key}
    return fork_beside(command, changes, log.fileno()) or subprocess.Popen(
        command,
        env={**os.environ, **changes},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def _appended(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def read_result(path: Path) -> LoadResult:
    """The last line of a result file. Raises KimiError for a missing file, a cut line or a missing figure."""
    return _read(path, LoadResult)


def read_details(path: Path) -> LoadDetails:
    """The per-request part of the last line, which `--output-details` adds. Raises KimiError like `read_result`."""
    return _read(path, LoadDetails)


def _read(path: Path, kind: type[Content]) -> Content:
    line = last_json_line(path)
    try:
        return kind.model_validate(json.loads(line))
    except (json.JSONDecodeError, ValidationError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else error
        raise KimiError(
            f"the load generator's result cannot be read: {detail}",
            where=str(path),
            expected="one JSON object a line, as sglang.bench_serving writes it",
            remedy="the run was cut short or the disk is full: measure again",
        ) from error


def last_json_line(path: Path) -> str:
    """The last non-empty line of a JSONL file; raises KimiError when there is none."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise KimiError(f"the load generator wrote no result: {error.strerror}", where=str(path)) from error
    if not lines:
        raise KimiError("the load generator wrote an empty result", where=str(path))
    return lines[-1]

"""Run `sglang.benchmark.serving` as a process against a running server and read what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import KimiError
from ..server import tail_lines

_GENERATOR = "sglang.benchmark.serving"
_ON_CPU = "kimi_w4a8_eagle3.sglang_plugin.run_module"


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


def write_conversations(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write (user, assistant) pairs in the format of the generator's `custom` dataset."""
    lines = (json.dumps({"conversations": [{"content": user}, {"content": answer}]}) for user, answer in pairs)
    path.write_text("\n".join(lines) + "\n")


def run_load(
    base_url: str,
    arguments: Sequence[str],
    num_prompts: int,
    concurrency: int,
    output: Path,
    timeout_s: float = 7200.0,
) -> LoadResult:
    """Send `num_prompts` requests, `concurrency` at a time, and return the generator's figures.

    arguments: further options of `sglang.benchmark.serving` (dataset, lengths, model). output: the JSONL file; what the
    generator prints goes beside it as `.log`. Raises KimiError when the generator fails or a request did.
    """
    command = [sys.executable, "-m", _ON_CPU, _GENERATOR, "--backend", "sglang", "--base-url", base_url]
    command += ["--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency)]
    command += ["--output-file", str(output), *arguments]
    log = output.with_suffix(".log")
    with log.open("ab") as file:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KimiError(f"the load generator did not finish within {timeout_s:.0f} s", where=str(log)) from error
    if done.returncode != 0:
        tail = "\n".join(tail_lines(log, 15))
        raise KimiError(f"the load generator failed with exit code {done.returncode}:\n{tail}", where=str(log))
    result = read_result(output)
    if result.completed != num_prompts:
        raise KimiError(
            f"{num_prompts - result.completed} of {num_prompts} requests failed",
            where=str(log),
            expected="every request answered",
            remedy="read the server's log; a run with failed requests is not comparable",
        )
    return result


def read_result(path: Path) -> LoadResult:
    """The last line of a result file. Raises KimiError for a missing file, a cut line or a missing figure."""
    line = last_json_line(path)
    try:
        content: dict[str, Any] = json.loads(line)
        return LoadResult.model_validate(content)
    except (json.JSONDecodeError, ValidationError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else error
        raise KimiError(
            f"the load generator's result cannot be read: {detail}",
            where=str(path),
            expected="one JSON object a line, as sglang 0.5.23 writes it",
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

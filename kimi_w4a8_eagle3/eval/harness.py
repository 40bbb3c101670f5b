"""lm-eval's command line, run as a process against the recorder with a progress display."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import KimiError
from ..engine.process import tail_lines
from .recorder import Recorder
from .tasks import Task

_GRACE_S = 5.0
# lm-eval's command line without two slow steps that this package does not need: the index of its thousands of built-in
# tasks, and the import of torch and transformers, used only for seeds and version notes. They take most of the start.
_PROGRAM = """
from functools import partial
from lm_eval import tasks, utils
utils.is_torch_available = utils.is_transformers_available = lambda: False
tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
_RETRIES = 1  # the recorder retries; more retries in lm-eval would only repeat its own


@dataclass(frozen=True)
class Protocol:
    """Settings that decide a run's figures. Runs that are compared must share them."""

    task: Task
    chat: bool
    shots: int
    max_tokens: int
    limit: int | None = None
    concurrency: int = 256
    seed: int = 1234


def command(protocol: Protocol, model: str, base_url: str, tasks: Path, output: Path) -> list[str]:
    kind, endpoint = (
        ("local-chat-completions", "/v1/chat/completions")
        if protocol.chat
        else ("local-completions", "/v1/completions")
    )
    # The recorder waits and retries, so lm-eval must not give up earlier.
    model_args = {
        "model": model,
        "base_url": base_url + endpoint,
        "num_concurrent": max(2, protocol.concurrency),  # 1 takes lm-eval's synchronous path, with other retries
        "max_retries": _RETRIES,
        "timeout": 7 * 86400,
        "max_gen_toks": protocol.max_tokens,
        "seed": protocol.seed,
        "tokenized_requests": False,
        "tokenizer_backend": None,
    }
    words = [sys.executable, "-c", _PROGRAM, "run", "--model", kind]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
    words += ["--tasks", protocol.task.name, "--include_path", str(tasks), "--num_fewshot", str(protocol.shots)]
    words += ["--output_path", str(output), "--log_samples"]
    if protocol.limit is not None:
        words += ["--limit", str(protocol.limit)]
    if protocol.chat:
        words += ["--apply_chat_template"]
    return words


def run_lm_eval(words: list[str], recorder: Recorder, log: Path, offline: bool, on_wait: Callable[[], None]) -> None:
    """Run lm-eval to its end, logging to `log`; raise KimiError when it fails or the server is gone."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "LMEVAL_LOG_LEVEL": "INFO"}
    if offline:
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and recorder.fatal is None:
            on_wait()
            time.sleep(0.2)
        on_wait()
    finally:
        _end(process)
    if recorder.fatal is not None:
        raise KimiError(recorder.fatal, where=recorder.upstream)
    if process.returncode != 0:
        tail = "\n".join(tail_lines(log, 15))
        raise KimiError(
            f"lm-eval failed with exit code {process.returncode}; the end of its log:\n{tail}",
            where=str(log),
            remedy="" if offline else "without access to the Hugging Face Hub, name the data with --data-dir",
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

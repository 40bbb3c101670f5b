"""A small model repository, and ways to fetch it in this process and in a child process."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.hub_server import HubServer

TOKEN = "hf_TopSecretTokenOfThisTest"
NAME = "org/model"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def model_files() -> dict[str, bytes]:
    weights = {name: content(n, 300_000 + n) for n, name in enumerate(SHARDS)}
    index = b'{"weight_map": {"a": "%s", "b": "%s", "c": "%s"}}' % tuple(name.encode() for name in SHARDS)
    small = {"config.json": b'{"architectures": ["X"]}', "model.safetensors.index.json": index, "empty.txt": b""}
    return weights | small | {"tokenizer/vocab file.txt": b"a b c"}


def at_endpoint(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set HF_ENDPOINT for child processes, and what huggingface_hub made of it in this one."""
    from huggingface_hub import constants

    patch.setenv("HF_ENDPOINT", endpoint)
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}")


@dataclass
class Done:
    """Files and output that a run of the command line left."""

    returncode: int
    stdout: str
    stderr: str


def kimi(hub: HubServer | str, home: Path, *arguments: str, **environment: str) -> Done:
    """Run `kimi-w4a8` in this process, with the endpoint and Hugging Face home that a child process would read."""
    from huggingface_hub import constants

    from kimi_w4a8_eagle3 import cli

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        at_endpoint(patch, hub if isinstance(hub, str) else hub.endpoint)
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", environment.pop("HF_HUB_OFFLINE", "0") == "1")
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("COLUMNS", "200")
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["kimi", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def kimi_process(hub: HubServer | str, home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `kimi-w4a8` as a user does, in a child process with its own Hugging Face home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    endpoint = hub if isinstance(hub, str) else hub.endpoint
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_w4a8_eagle3.cli", *arguments],
        env=kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "COLUMNS": "200"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

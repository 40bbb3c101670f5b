"""`python -m proof.hostile.timed_gateway FILE`: the gateway, whose workers record long calls of their event loops.

TIMED_CALLS names the folder: a file for each worker, with lines of [monotonic second, ms of CPU, what was called].
The loop is asyncio's, because Python cannot time the callbacks of uvloop.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import uvicorn

from kimi_w4a8_eagle3.gateway import __main__, app

LEAST_MS = 2.0  # shorter calls are not recorded


def record_calls(file: Path) -> None:
    """Append a line to the file for every long call of an event loop of this process from now on."""
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        began = time.thread_time_ns()
        run(handle)
        if (ms := (time.thread_time_ns() - began) / 1e6) >= LEAST_MS:
            with file.open("a") as lines:
                lines.write(json.dumps([time.monotonic(), ms, repr(handle)[:400]]) + "\n")

    setattr(asyncio.Handle, "_run", timed)  # noqa: B010  # a method of its stub


def create() -> app.Gateway:
    """Return the application of a worker, and record its calls."""
    record_calls(Path(os.environ["TIMED_CALLS"]) / str(os.getpid()))
    return app.create()


if __name__ == "__main__":
    serve: Any = uvicorn.run
    uvicorn.run = lambda _, **given: serve("proof.hostile.timed_gateway:create", **{**given, "loop": "asyncio"})
    __main__.main()

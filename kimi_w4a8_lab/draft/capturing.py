"""Run the engine of a recipe over stored conversations, and show how far it is; a stopped run continues."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kimi_w4a8_eagle3.base.collection import VARIABLE
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine.process import Program, start_engine
from kimi_w4a8_eagle3.recipe.arguments import command_words
from kimi_w4a8_eagle3.recipe.launch import Launch
from kimi_w4a8_eagle3.supervision.checks import checked

from .collected import JOB
from .states import CapturePlan

PROGRAM = "kimi_w4a8_lab.with_sglang.state_capture"
_POLL_S = 0.5


def capture(launch: Launch, plan: CapturePlan, tokenizer: str, log: Path, show: Callable[[int], None]) -> None:
    """Write the missing states of `plan`. Raises KimiError when the engine ends early; finished files stay.

    tokenizer: name of the one whose ids the conversations have. show: takes the number of finished tokens.
    """
    launch = checked(launch).with_args(disable_radix_cache=True, enable_return_hidden_states=True)
    with TemporaryDirectory(prefix=JOB, dir=plan.folder) as name:  # where `draft erase` finds it after a kill
        folder = Path(name)
        job = {"arguments": command_words(launch.args), "folder": str(plan.folder.absolute()), "tokenizer": tokenizer}
        rows = {one.name: one.tokens for one in plan.missing}
        (folder / "job.json").write_text(json.dumps({**job, "progress": str(folder / "progress"), "rows": rows}))
        program = Program(PROGRAM, (str(folder / "job.json"),))
        environ = {name: value for name, value in {**os.environ, **launch.env}.items() if name != VARIABLE}
        with log.open("ab") as output:
            command = program if launch.args.get("device") == "cpu" else program.alone
            process = start_engine(command, environ, output.fileno())
        try:
            while (code := process.poll()) is None:
                with suppress(OSError, ValueError):
                    show(int((folder / "progress").read_text()))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60.0)
    absent = [one for one in plan.missing if not plan.path(one).exists()]
    if code or absent:
        what = f"the engine ended with code {code}; states of {len(absent)} conversations are missing"
        raise KimiError(what, str(log), "states of all", "read the end of the log, then run the same command again")

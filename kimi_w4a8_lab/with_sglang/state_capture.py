"""Program that prefills stored conversations with SGLang and writes the states which a draft of the target captures.

The engine is that of the recipe, without its HTTP server. With EAGLE3 every prefill gives the captured states to the
draft. Here the scheduler also writes them to a file, so that they cross no other process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.server_args import ServerArgs, prepare_server_args

from kimi_w4a8_eagle3.base.collection import PROBE, tokenizer_name

from ..draft.states import write_states

FOLDER = "KIMI_DRAFT_STATES"  # variable with the folder, for the schedulers' processes
_AT_ONCE = 32
_APPEND = "_append_prefill_hidden_states"


def keep_states(folder: Path | None) -> None:
    """Write each prefill's states in this scheduler, in place of SGLang's lists of numbers for the client.

    folder: None for a rank whose states another rank writes.
    """
    parts: dict[str, list[torch.Tensor]] = {}  # by conversation: states of its prefill's chunks so far

    def append(
        self: object, *, req: Any, logits_output: Any, hidden_state_offset: int, extend_input_len: int, **_: object
    ) -> int:
        end = hidden_state_offset + extend_input_len
        if folder is not None and req.return_hidden_states:
            known = parts.setdefault(req.rid, [])
            known.append(logits_output.hidden_states[hidden_state_offset:end].to("cpu", torch.bfloat16).clone())
            if sum(map(len, known)) >= len(req.origin_input_ids):
                write_states(folder, req.rid, torch.cat(parts.pop(req.rid)))
        return end

    if not callable(getattr(SchedulerBatchResultProcessor, _APPEND, None)):
        sys.exit(f"kimi-w4a8: this SGLang release has no SchedulerBatchResultProcessor.{_APPEND}")
    setattr(SchedulerBatchResultProcessor, _APPEND, append)


def run_scheduler(args: ServerArgs, ports: Any, gpu: int, rank: int, *more: Any, **named: Any) -> None:
    """Run SGLang's scheduler; the first rank of each group that computes the same requests writes their states."""
    group = args.tp_size // args.dp_size if args.enable_dp_attention else args.tp_size
    keep_states(Path(os.environ[FOLDER]) if rank % group == 0 else None)
    run_scheduler_process(args, ports, gpu, rank, *more, **named)


class CapturingEngine(Engine):
    """SGLang's engine with these schedulers."""

    run_scheduler_process_func = staticmethod(run_scheduler)


def main(job_file: Path) -> None:
    """Capture the conversations of the job, and write the number of finished tokens to its progress file."""
    job = json.loads(job_file.read_text())
    os.environ[FOLDER] = job["folder"]
    rows = list(job["rows"].items())
    engine, done = CapturingEngine(server_args=prepare_server_args(job["arguments"])), 0
    manager = engine.tokenizer_manager
    name = tokenizer_name(manager.tokenizer.encode(PROBE), manager.model_config.vocab_size)
    if job["tokenizer"] not in ("", name):
        sys.exit("kimi-w4a8: the conversations have token ids of another tokenizer than this target's")
    params = {"max_new_tokens": 1, "temperature": 0.0}
    while rows and not manager.gracefully_exit:  # SGLang notes SIGTERM, and goes on with what it is asked
        part, rows = rows[:_AT_ONCE], rows[_AT_ONCE:]
        names, ids = map(list, zip(*part, strict=True))
        engine.generate(input_ids=ids, sampling_params=params, rid=names, return_hidden_states=True)
        done += sum(map(len, ids))
        Path(job["progress"]).write_text(str(done))
    engine.shutdown()


if __name__ == "__main__":
    # A spawned scheduler imports its function by the module's own name.
    from kimi_w4a8_lab.with_sglang import state_capture

    state_capture.main(Path(sys.argv[1]))

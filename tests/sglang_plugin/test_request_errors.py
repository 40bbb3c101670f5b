"""Errors that end a request and errors that end the engine; tests/e2e/test_failing_requests.py has a real engine."""

from pathlib import Path

import pytest
from support.sglang_program import BOTH, found, start

TWO_RANKS = """
import signal, sys, types
import torch.distributed as dist
from kimi_w4a8_eagle3.sglang_plugin.upkeep import failing_requests
rank, others_come = int(sys.argv[1]), sys.argv[3] == "come"
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
failing_requests.get_attn_tp_group = lambda: types.SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
failing_requests._RANKS_AGREE_S = 2.0 if not others_come else 60.0
if rank == 0 or others_come:
    print(failing_requests._all_ranks_failed())
else:
    signal.pause()  # this rank did not fail: it goes on to its next collective
"""


@pytest.mark.parametrize(("others", "agreed"), [("come", "True"), ("stay", "False")])
def test_a_request_is_ended_only_where_every_rank_failed(tmp_path: Path, others: str, agreed: str) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    ranks = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        ranks.append(start(TWO_RANKS, folder, str(rank), str(tmp_path / "store"), others))
    try:
        assert ranks[0].wait(200) == 0, (folders[0] / "log").read_text()
        assert (folders[0] / "output").read_text().strip() == agreed
        if others == "come":
            assert ranks[1].wait(200) == 0
            assert (folders[1] / "output").read_text().strip() == "True"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


ERRORS = """
import json, sys
from dataclasses import asdict, dataclass, field
import torch
from kimi_w4a8_eagle3.sglang_plugin.upkeep import failing_requests
from kimi_w4a8_eagle3.sglang_plugin.upkeep.failing_outputs import OF_CONTENT

@dataclass
class Rows:
    rids: list = field(default_factory=lambda: ["a", "b"])
    texts: list = field(default_factory=lambda: ["A"])
    extras: dict = field(default_factory=lambda: {"x": [1, 2], "y": []})
    none: object = None

def caught(module):
    names = {"__name__": module}
    exec("def call(): raise ValueError('no page')", names)  # a function of that module
    try:
        names["call"]()
    except ValueError as error:
        return error

failing_requests._all_ranks_failed = lambda: True
of_the_machine = {
    "memory": torch.OutOfMemoryError("HIP out of memory"),
    "device": RuntimeError("HIP error: an illegal memory access was encountered"),
    "rank": torch.distributed.DistBackendError("a rank is gone"),
    "pools": caught("sglang.srt.mem_cache.common"),  # the state of the pools after half an allocation is unknown
}
of_requests = {
    "overflow": RuntimeError("value cannot be converted to type int64 without overflow"),
    "scheduler": caught("sglang.srt.managers.scheduler"),
}
errors = {**of_the_machine, **of_requests}
rows = Rows()
failing_requests._take_back(rows, 1)
print(json.dumps({
    "ended alone": [name for name, error in errors.items() if failing_requests._request_failed(error)],
    "of content": [kind.__name__ for kind in (MemoryError, OSError) if issubclass(kind, OF_CONTENT)],
    "rows": asdict(rows),
}))
"""


def test_errors_of_the_machine_and_of_the_pools_end_the_engine() -> None:
    got = found(ERRORS)
    assert got["ended alone"] == ["overflow", "scheduler"] and got["of content"] == []


def test_half_a_row_is_taken_back_from_every_list() -> None:
    assert found(ERRORS)["rows"] == {"rids": ["a"], "texts": ["A"], "extras": {"x": [1], "y": []}, "none": None}


DEAD = """
import json
from types import SimpleNamespace
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
class Grammar:
    def accept_token(self, token):
        raise ValueError("not in the grammar")
req = SimpleNamespace(rid="1", grammar=Grammar(), to_finish=None)
kept = SchedulerBatchResultProcessor._accept_grammar_tokens(object.__new__(SchedulerBatchResultProcessor), req, [1])
print(json.dumps({"kept": kept, "status": int(req.to_finish.status_code)}))
"""


@BOTH
def test_a_grammar_that_allows_no_token_is_no_answer(newest: bool) -> None:
    got = found(DEAD, newest)
    assert got["kept"] == [] and got["status"] == (500 if newest else 400)  # 0.5.23 names a status itself


BATCH = """
import asyncio, json
from types import SimpleNamespace
from unittest.mock import Mock
import msgspec
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput, GenerateReqInput
tokenizer_manager.get_serving = lambda: SimpleNamespace(batch_notify_size=16)
tokenizer_manager.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
manager = object.__new__(tokenizer_manager.TokenizerManager)
sent = []
settings = dict.fromkeys(("enable_metrics", "skip_tokenizer_init", "dump_requests_folder", "crash_dump_folder"), False)
vars(manager).update(
    settings, config_value=lambda name: name, enable_lora=False, rid_to_state={}, incremental_streaming_output=False,
    abort_request=sent.append,
)
def state(rid, **fields):
    obj = GenerateReqInput(text="x", rid=rid, return_logprob=rid in ("broken", "refused", "waiting"), **fields)
    obj.log_metrics = False
    # None of candidates is what no request may ask for: SGLang compares it with 0
    obj.top_logprobs_num = None
    times = Mock(first_token_time=1.0, **{"trace_ctx.tracing_enable": False})
    made = tokenizer_manager.ReqState([], False, asyncio.Event(), obj, times)
    manager.rid_to_state[rid] = made
    return made
async def main():
    rids = ["first", "broken", "middle", "refused", "last"]
    states = {rid: state(rid, stream=rid == "middle") for rid in rids}
    refused = {"type": "abort", "message": "no such grammar", "status_code": 400}
    reasons = [{"type": "stop"}, None, None, refused, {"type": "length"}]
    columns = {field.name: None for field in msgspec.structs.fields(BatchStrOutput) if field.required}
    zeros = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "retraction_counts")
    columns |= {name: [0] * 5 for name in zeros} | {"output_ids": [[7]] * 5, "output_strs": rids, "rids": list(rids)}
    await manager._handle_batch_output(BatchStrOutput(**columns | {"finished_reasons": reasons}))
    states["waiting"] = state("waiting")
    manager._handle_abort_req(AbortReq(rid="waiting", finished_reason=refused))  # in no batch yet
    return {
        rid: {
            "outputs": len(request.out_list), "told": request.event.is_set(), "finished": request.finished,
            "text": request.get_text(),
            "status": (request.out_list[-1]["meta_info"]["finish_reason"] or {}).get("status_code"),
        }
        for rid, request in states.items()
    }
print(json.dumps({"requests": asyncio.run(main()), "left": list(manager.rid_to_state), "sent": sent}))
"""


@BOTH
def test_an_output_that_raises_ends_its_request_and_no_other(newest: bool) -> None:
    got = found(BATCH, newest)
    assert got["requests"] == {
        rid: {"outputs": 1, "told": True, "finished": finished, "text": text, "status": status}
        for rid, finished, text, status in (
            ("first", True, "first", None),
            ("broken", True, "", 500),
            ("middle", False, "middle", None),
            ("refused", True, "", 400),
            ("last", True, "last", None),
            ("waiting", True, "", 400),
        )
    }
    assert got["left"] == ["middle"]
    assert got["sent"] == ["broken"]  # the scheduler still worked on it

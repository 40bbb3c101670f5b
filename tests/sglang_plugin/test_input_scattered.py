"""Input-scattered attention with EAGLE3: the same bits as without it, on ranks that are processes with gloo.

`support/scattered_ranks.py` compares what enters each layer, and the logits, over whole prompts, several prompts and
chunks. Most have one row more than a multiple of eight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.sglang_program import BOTH, VERSIONS, found

PROGRAM = (Path(__file__).parents[1] / "support/scattered_ranks.py").read_text()
ROWS = 17, 1, 33, 65, 25  # of the prefills, the last one of two chunks
FAULTS = ("wrong_share", "no_gather", "embedding_twice", "residual_first", "padding_kept")

SERVED_WITHOUT = """
import json, torch
from types import SimpleNamespace
from kimi_w4a8_eagle3.sglang_plugin import hooks
from kimi_w4a8_eagle3.sglang_plugin.prefill import input_scattered

kept = {"tp_size": 8, "pp_size": 1, "moe_ep_size": 1, "moe_dense_tp_size": None, "attn_cp_size": 1,
        "enable_attn_tp_input_scattered": True}
group = SimpleNamespace(rank_in_group=0, world_size=8)
input_scattered.get_tp_group = lambda: group
context = SimpleNamespace(allow_input_scattered=False)
input_scattered.deepseek_v2 = SimpleNamespace(get_attn_tp_context=lambda: context)
said = []
hooks.logger = SimpleNamespace(warning=lambda text, *args: said.append(text % args))

def served(model="DeepseekV3ForCausalLM", graphs=False, dp=False, a2a=False, draft=False, rank=0, dsa=False,
           q_lora_rank=1536, **layout):
    parallel = SimpleNamespace(**{**kept, **layout})
    input_scattered.runtime_context = SimpleNamespace(get_parallel=lambda: parallel)
    input_scattered.check_cuda_graph_backend = lambda *_: not graphs
    input_scattered.is_dp_attention_enabled = lambda: dp
    input_scattered.get_moe_a2a_backend = lambda: SimpleNamespace(is_none=lambda: not a2a)
    layers = [SimpleNamespace(post_attention_layernorm=object()) for _ in range(3)]
    target = type(model, (), {})()
    if "Llama" not in model:
        target.config, target.use_dsa = SimpleNamespace(q_lora_rank=q_lora_rank), dsa
    target.model = SimpleNamespace(layers=layers)
    runner = SimpleNamespace(is_draft_worker=draft, model=SimpleNamespace(language_model=target))
    group.rank_in_group, context.allow_input_scattered = rank, False
    del said[:], hooks.missing_features[:]
    input_scattered.allow(None, runner)
    return [context.allow_input_scattered, list(said), list(hooks.missing_features)]

elsewhere = torch.ones(3, 1)  # rows outside of a prefill by shares
input_scattered.clear_padding(elsewhere)
embeds = torch.ones(3, 1)
batch = SimpleNamespace(spec_info=None, extend_num_tokens=2, mm_input_embeds=embeds)
context.use_input_scattered = lambda _: True
input_scattered._inner_norms.add(1)
group.rank_in_group = 1

def fails(*given):
    raise ValueError(given[4].sum().item())

try:
    input_scattered.forward(fails, None, None, None, batch, embeds)
except ValueError as error:
    failed = [*error.args, embeds.sum().item(), *input_scattered._rows, len(batch.mm_input_embeds)]
of_draft = [SimpleNamespace(spec_info=spec_info) for spec_info in (None, object())]
print(json.dumps({
    "of draft": [input_scattered.use_input_scattered(lambda *_: True, None, batch) for batch in of_draft],
    "failed": failed, "all": served(), "draft": served(draft=True), "off": served(enable_attn_tp_input_scattered=False),
    "one": served(tp_size=1), "pp": served(pp_size=2), "ep": served(moe_ep_size=8), "a2a": served(a2a=True),
    "dp": served(dp=True), "dense": served(moe_dense_tp_size=1), "cp": served(attn_cp_size=2),
    "graphs": served(graphs=True), "llama": served(model="LlamaForCausalLM"), "dsa": served(dsa=True),
    "queries": served(q_lora_rank=None), "rank 1": served(dp=True, rank=1), "elsewhere": elsewhere.tolist(),
}))
"""
WHY = {
    "one": "there is one rank",
    "pp": "--pp-size",
    "ep": "--ep-size",
    "a2a": "--ep-size",
    "dp": "--enable-dp-attention",
    "dense": "--moe-dense-tp-size",
    "cp": "--attn-cp-size",
    "graphs": "pass --disable-prefill-cuda-graph",
    "llama": "the model is LlamaForCausalLM",
    "dsa": "its attention is sparse",
    "queries": "no low-rank projection",
}


def compared(newest: bool, ranks: int, *faults: str) -> dict[str, list[list[dict[str, Any]]]]:
    return found(PROGRAM, newest, str(ranks), *faults)


@BOTH
def test_what_does_not_go_with_it_is_served_without_it_and_says_so_once(newest: bool) -> None:
    answers = found(SERVED_WITHOUT, newest)
    assert answers["all"] == [True, [], []] and answers["of draft"] == [True, False]
    assert answers["draft"] == answers["off"] == [False, [], []]
    missing = ["input-scattered attention"]
    for name, why in WHY.items():
        allowed, said, features = answers[name]
        assert (allowed, len(said), features) == (False, 1, missing), name
        assert said[0].startswith("serving without input-scattered attention: ") and why in said[0]
    assert answers["rank 1"] == [False, [], missing]  # rank 0 says it
    # What is summed, the caller's embeddings, rows for the next pass, and the draft's without padding.
    assert answers["failed"] == [0, 3, 0, 2]
    assert answers["elsewhere"] == [[1.0]] * 3  # no row is padding there


@pytest.mark.slow
@pytest.mark.parametrize("newest", (False, True), ids=VERSIONS)
@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_every_layer_reads_the_same_bits(newest: bool, ranks: int) -> None:
    answers = compared(newest, ranks, "none")["none"]
    shares = [{"rows": -(-rows // ranks), "differs": [], "not finite": []} for rows in ROWS]
    assert answers == [shares] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    for answers in compared(False, 3, *FAULTS)[fault]:
        assert answers[-1]["differs"] or answers[-1]["not finite"]


@pytest.mark.slow
def test_padding_rows_that_attention_leaves_reach_no_router() -> None:
    faulty = compared(False, 3, *FAULTS)["padding_kept"]
    assert all(answers[0]["not finite"] for answers in faulty)  # else the rows were not poisoned

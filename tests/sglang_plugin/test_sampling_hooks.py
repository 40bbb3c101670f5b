"""The hooks of exact sampling on both releases: all apply or nothing is served, and unknown verification is refused.

The operators below SGLang are stand-ins that refuse what `kimi_w4a8_laptop/contracts.py` does not allow.
"""

from __future__ import annotations

import pytest
from support.sglang_program import BOTH, found

PROGRAM = """
import json, os
from types import SimpleNamespace

from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import eagle_utils

from kimi_w4a8_eagle3.sglang_plugin.decoding import exact_sampling
from kimi_w4a8_eagle3.sglang_plugin.hooks import Feature, register


def ended(call):
    try:
        call()
        return None
    except SystemExit as error:
        return str(error)


answer = {}
topk = 1
runtime_context.get_spec = lambda: SimpleNamespace(speculative_eagle_topk=topk)
answer["chain"] = ended(exact_sampling.require_known_verification)
topk = 4
answer["tree"] = ended(exact_sampling.require_known_verification)
topk = 1
known = eagle_utils.eagle_sample
eagle_utils.eagle_sample = lambda *args, **named: known(*args, **named)
eagle_utils.eagle_sample.__wrapped__ = known
answer["not called"] = ended(exact_sampling.require_known_verification)
eagle_utils.eagle_sample = known

seeds = [SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))
         for rid, seed in (("a", None), ("b", None), ("a", None), ("c", 7), ("d", 2**64 + 7), ("e", -1))]
answer["seeds"] = [exact_sampling._seed(req) for req in seeds]

feature = Feature("a class", "never", environ={"KIMI_OF_A_FEATURE": "1"})
feature.before("sglang.srt.layers.sampler.Sampler")(lambda *_: None)  # SGLang's registry only logs that it cannot
register(HookRegistry, [feature])
answer["unapplied"], answer["environ"] = ended(HookRegistry.apply_hooks), os.environ.get("KIMI_OF_A_FEATURE")
print(json.dumps(answer))
"""

SAMPLED = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from sglang.srt.layers import sampler
from sglang.srt.speculative import eagle_utils

from kimi_w4a8_eagle3.sglang_plugin.decoding import exact_sampling

BATCH, N, V = 2, 4, 50
exact_sampling.is_dp_attention_enabled = lambda: False
shared, of_rank_0 = [], lambda tensor, src: shared.append(tensor.fill_(src + 7).numel())
exact_sampling.get_tp_group = lambda: SimpleNamespace(world_size=2, ranks=[4, 5], broadcast=of_rank_0)
if sys.argv[1:]:  # a draw that returns another type
    drawn = exact_sampling.draw
    exact_sampling.draw = lambda *args: drawn(*args).to(getattr(torch, sys.argv[1]))
chains = torch.full((BATCH, N), 7)
links = torch.arange(1, N).repeat(BATCH, 1)
verify_input = SimpleNamespace(
    draft_token=chains.flatten(), draft_token_num=N, max_tree_depth=N, tree_topk=1, positions=torch.arange(BATCH * N),
    retrieve_index=torch.arange(BATCH * N).view(BATCH, N),
    retrieve_next_token=torch.cat([links, torch.full((BATCH, 1), -1)], 1),
    retrieve_next_sibling=torch.full((BATCH, N), -1),
)
info = SimpleNamespace(
    vocab_size=V, is_all_greedy=False, logit_bias=None, temperatures=torch.ones(BATCH, 1),
    need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False,
    top_ks=torch.full((BATCH,), 1 << 30, dtype=torch.int32), top_ps=torch.ones(BATCH), min_ps=torch.zeros(BATCH),
    sampling_seed=torch.arange(BATCH), kimi_penalties=None,
)
batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=info, reqs=[])
logits = SimpleNamespace(next_token_logits=torch.randn(BATCH * N, V))
try:
    verified = eagle_utils.eagle_sample(verify_input, batch, logits)
    answer = {"dtypes": [str(tensor.dtype) for tensor in verified]}
except RuntimeError as error:
    answer = {"refused": str(error)}
else:
    info.is_all_greedy = True
    mask = SimpleNamespace(apply=lambda logits: logits[:, 0].fill_(-torch.inf))
    eagle_utils.eagle_sample(verify_input, batch, logits, mask)
    answer["masked"] = logits.next_token_logits[:, 0].unique().tolist()
    counted = []
    exact_sampling._any_penalized = lambda reqs: True
    exact_sampling.penalties_of = lambda *_: SimpleNamespace(
        apply=lambda *_: None, count=lambda tokens: counted.append(tokens.tolist())
    )
    eagle_utils.eagle_sample(verify_input, batch, logits)
    answer["counted"] = counted
    verify_input.draft_token = torch.arange(BATCH * N)
    exact_sampling.agree_on_drafts(None, SimpleNamespace(spec_info=verify_input))
    drawn = exact_sampling.sample(lambda *_: torch.arange(BATCH), None, None, SimpleNamespace(sampling_info=info))
    info.sampling_mask_batch_indices, info.grammars = None, [None]
    constrained, _ = exact_sampling.sample_from_probs(None, None, torch.full((BATCH, V), 1 / V), info, drawn, True)
    agreed = (*verified, verify_input.draft_token, drawn, constrained)
    at, info.kimi_penalties = [], SimpleNamespace(apply=lambda _, at_: at.append(at_.tolist()), count=lambda _: None)
    prefill = SimpleNamespace(sampling_info=info, forward_mode=SimpleNamespace(is_decode=lambda: False))
    prefill.seq_lens = torch.tensor([5, 9])
    exact_sampling.sample(lambda *_: torch.arange(BATCH), None, logits, prefill)
    answer["last tokens"] = at
    sampler.get_exec = sampler.get_parallel = sampler.get_tp_group = MagicMock()
    answer["torch's softmax"] = sampler.Sampler().enable_deterministic is True
    needs = [name for name in vars(info) if name.startswith("need_")]
    filtered = [exact_sampling._filters(SimpleNamespace(**{**vars(info), need: True})) for need in needs]
    answer["active"] = [one.active for one in [exact_sampling._filters(info), *filtered]]
    answer |= {"shared": shared, "agreed": [tensor.unique().tolist() for tensor in agreed]}
print(json.dumps(answer))
"""

KEPT = """
import json
from types import SimpleNamespace

import torch

from kimi_w4a8_eagle3.sampling import penalties
from kimi_w4a8_eagle3.sglang_plugin.decoding import exact_sampling


class Pool:
    req_to_token = torch.zeros(64, 8, dtype=torch.int32)


class Req:
    def __init__(self, rid, frequency):
        self.rid, self.tokenizer, self.eos_token_ids = rid, None, None
        self.origin_input_ids, self.output_ids = [1], [2, 2]
        self.sampling_params = SimpleNamespace(
            frequency_penalty=frequency, presence_penalty=0.0, repetition_penalty=1.0,
            min_new_tokens=0, stop_token_ids=None,
        )


def batch(reqs, extend=False):
    mode = SimpleNamespace(is_extend=lambda: extend, is_target_verify=lambda: False)
    return SimpleNamespace(reqs=reqs, req_to_token_pool=pool, forward_mode=mode, decoding_reqs=None)


sent, copy = 0, penalties.Penalties._sent
def counted(*arguments, **more):
    global sent
    sent += 1
    return copy(*arguments, **more)
penalties.Penalties._sent = counted

stopping = Req("x", 0.5)
stopping.eos_token_ids = [4]
stops = exact_sampling._penalized(stopping, 0, 0, False).stops
given = [Req("x", frequency) for frequency in (0.0, 0.5, 0.0)]
scanned = [exact_sampling._any_penalized([req]) for req in given]
pool, reqs = Pool(), [Req("a", 0.0), Req("b", 0.5), Req("c", 0.5)]
copies = []
for one in (batch(reqs[:1]), batch(reqs, extend=True), batch(reqs), batch(reqs), batch(reqs[1:]), batch(reqs[1:]),
            batch([reqs[2], Req("d", 0.1)])):
    sent = 0
    found = exact_sampling.penalties_of(one, 50)
    copies.append(sent)
rest = batch(reqs[:1])  # the penalized requests of this sampling_info have ended
rest.sampling_info = SimpleNamespace(kimi_penalties=found, vocab_size=50)
exact_sampling.keep_penalties(None, rest)
copies.append(rest.sampling_info.kimi_penalties)
exact_sampling.penalties_of(batch(reqs[1:]), 50)
reqs[1].output_ids = [2, 2, 2]
exact_sampling.penalties_of(batch(reqs[1:], extend=True), 50)  # retracted: the same batch prefills again
rows = exact_sampling._tables[pool].counts
print(json.dumps({"scanned": scanned, "stops": stops, "copies": copies, "rows": [int(row[2]) for row in rows[:3]]}))
"""


@BOTH
def test_penalties_are_copied_only_when_the_batch_changes_and_made_again_in_a_prefill(newest: bool) -> None:
    """Five tensors a change of the batch, and one for each request whose counts are made."""
    scanned = [False, True, False]  # of new lists in the same memory
    copies = [0, 7, 0, 0, 5, 0, 6, None]
    assert found(KEPT, newest) == {"scanned": scanned, "stops": [4], "copies": copies, "rows": [3, 2, 2]}


@BOTH
def test_a_verify_step_is_the_operators_on_every_rank(newest: bool) -> None:
    """The draws of rank 0 equal all drafts of this test, so every rank accepts each chain."""
    step = found(SAMPLED, newest)
    assert step["dtypes"] == ["torch.int32"] * 3
    assert step["agreed"] == [[7], [4], list(range(8)), [7], [7], [7]]
    assert step["torch's softmax"] and step["last tokens"] == [[4, 8]]
    assert step["active"] == [False, True, True, True]  # filters: none, and each of the three alone
    assert step["shared"] == [8, 8, 8, 8, 2, 2, 2]  # verified, grammar, penalties, drafts, three plain steps
    assert step["counted"] == [[[7, 7, 7, 7]] * 2]  # by penalties: every token that is accepted
    assert step["masked"] == [pytest.approx(-1e30)]  # as in plain decoding; SGLang's own verification leaves -inf


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_draws_of_another_type_are_refused_by_the_operator(dtype: str) -> None:
    refused = found(SAMPLED, False, dtype)["refused"]
    assert f"verify_tree_greedy: target_predict is torch.{dtype}, expected torch.int64" in refused


@BOTH
def test_what_cannot_be_verified_is_not_served(newest: bool) -> None:
    answer = found(PROGRAM, newest)
    assert answer["chain"] is None
    assert "--speculative-eagle-topk 4 makes a tree" in answer["tree"]
    assert "calls another verification" in answer["not called"]
    assert "sglang.srt.layers.sampler.Sampler" in answer["unapplied"] and answer["environ"] == "1"


@BOTH
def test_every_request_has_a_seed_that_all_ranks_know(newest: bool) -> None:
    first, second, again, *given = found(PROGRAM, newest)["seeds"]
    assert first == again != second and abs(first) < 2**63
    assert given == [7, 7, -1]

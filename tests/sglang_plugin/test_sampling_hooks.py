"""The hooks of exact sampling on both releases: all apply or nothing is served, and unknown verification is refused."""

from __future__ import annotations

from support.sglang_program import BOTH, found

PROGRAM = """
import json
from types import SimpleNamespace

from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import eagle_utils

from kimi_w4a8_eagle3.sglang_plugin import exact_sampling
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
known, eagle_utils.eagle_sample = eagle_utils.eagle_sample, lambda verify_input, logits: None
answer["other arguments"] = ended(exact_sampling.require_known_verification)
eagle_utils.eagle_sample = lambda *args, **named: known(*args, **named)
eagle_utils.eagle_sample.__wrapped__ = known
answer["not called"] = ended(exact_sampling.require_known_verification)
eagle_utils.eagle_sample = known

seeds = [SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))
         for rid, seed in (("a", None), ("b", None), ("a", None), ("c", 7), ("d", 2**64 + 7), ("e", -1))]
answer["seeds"] = [exact_sampling._seed(req) for req in seeds]

feature = Feature("a class", "never")  # SGLang's registry hooks no class, and only logs it
feature.before("sglang.srt.layers.sampler.Sampler")(lambda *_: None)
register(HookRegistry, [feature])
answer["unapplied"] = ended(HookRegistry.apply_hooks)
print(json.dumps(answer))
"""


@BOTH
def test_what_cannot_be_verified_is_not_served(newest: bool) -> None:
    answer = found(PROGRAM, newest)
    assert answer["chain"] is None
    assert "--speculative-eagle-topk 4 makes a tree" in answer["tree"]
    assert (
        "verify_input, logits" in answer["other arguments"]
        and "options.speculation = 'off'" in answer["other arguments"]
    )
    assert "calls another verification" in answer["not called"]
    assert "sglang.srt.layers.sampler.Sampler" in answer["unapplied"]


@BOTH
def test_every_request_has_a_seed_that_all_ranks_know(newest: bool) -> None:
    first, second, again, *given = found(PROGRAM, newest)["seeds"]
    assert first == again != second and abs(first) < 2**63
    assert given == [7, 7, -1]

"""A kind of batch that fails again and again is found, whatever other batches do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kimi_w4a8_eagle3.sglang_plugin.upkeep.repeated_failures import RepeatedFailures, features_of, mode_of

SAMPLED, BOTH, GREEDY = frozenset({"sampled"}), frozenset({"sampled", "grammar"}), frozenset[str]()


def request(top_k: int = 1, frequency: float = 0.0, min_new: int = 0, grammar: object = None) -> Any:
    params = SimpleNamespace(
        top_k=top_k, frequency_penalty=frequency, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=min_new
    )
    return SimpleNamespace(sampling_params=params, grammar=grammar, return_logprob=False)


def batch(mode: str, *requests: Any) -> Any:
    forward = SimpleNamespace(is_extend=lambda: mode != "decode", is_target_verify=lambda: mode == "verify")
    plain = SimpleNamespace(is_none=lambda: mode == "decode")
    return SimpleNamespace(forward_mode=forward, spec_algorithm=plain, reqs=list(requests))


@pytest.mark.parametrize("mode", ["prefill", "verify", "decode"])
def test_a_batch_has_a_mode_and_features(mode: str) -> None:
    assert mode_of(batch(mode)) == mode
    assert features_of(batch(mode, request(), request(top_k=50))) == SAMPLED
    assert features_of(batch(mode, request(frequency=0.1, grammar="g"))) == {"penalised", "grammar"}
    assert features_of(batch(mode, request(min_new=1))) == {"penalised"}


@pytest.mark.parametrize(
    ("passed", "forgotten"),
    [
        (batch("prefill", request(top_k=50)), False),
        (batch("verify", request()), False),
        (batch("verify", request(), request(top_k=50)), True),
        (batch("verify", request(top_k=50, frequency=1.0)), True),
    ],
    ids=["prefill", "greedy", "beside-greedy", "penalised-too"],
)
def test_only_a_pass_of_the_same_kind_ends_a_run(passed: Any, forgotten: bool) -> None:
    failures = RepeatedFailures()
    assert failures.failed("verify", BOTH, "RuntimeError") == 1
    assert failures.failed("verify", SAMPLED, "RuntimeError") == 2
    assert failures.failed("verify", SAMPLED, "ValueError") == 1
    failures.passed(passed)
    assert failures.failed("verify", SAMPLED, "RuntimeError") == (1 if forgotten else 3)


def test_batches_that_share_nothing_end_with_any_healthy_one() -> None:
    failures = RepeatedFailures()
    failures.failed("decode", SAMPLED, "RuntimeError")
    failures.failed("decode", GREEDY, "RuntimeError")
    failures.passed(batch("decode"))  # idle
    assert failures.failed("decode", GREEDY, "RuntimeError") == 3
    failures.passed(batch("decode", request()))
    assert failures.failed("decode", GREEDY, "RuntimeError") == 1

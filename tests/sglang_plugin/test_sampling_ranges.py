"""Numbers at the edges of float32: refused by name and range, or harmless in SGLang's own sampling."""

from __future__ import annotations

import math
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.sglang_program import found

from kimi_w4a8_eagle3.sglang_plugin.http.request_guard import check_numbers

# float32: its largest number, the smallest normal and the smallest of all, each beside what is beyond; then float64's.
_EDGES = (
    *(0.0, 1e-46, 1.4e-45, 1.1754942e-38, 1.1754944e-38, 1e-300, 5e-324, 2.2250738585072014e-308, 9.9e-7, 1e-6, 0.01),
    *(1.0, 1.0000001, 2.0, 2.0000001, 100.0, 3.4028235e38, 3.4028236e38, 1e38, 1e39, 1.7e308, math.inf, math.nan),
)
_NUMBERS = (
    st.sampled_from([*_EDGES, *(-edge for edge in _EDGES)]) | st.floats() | st.floats(0, 2) | st.floats(-100, 100)
)
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
_COUNTS = ("top_k", "max_new_tokens", "min_new_tokens", "stream_interval")


def refused(name: str, value: float) -> bool:
    """Return True if the guard refuses the value; its message must have the name and the range."""
    try:
        check_numbers({name: {"7": value} if name == "logit_bias" else value}, 640)
    except ValueError as error:
        assert re.match(rf"{name} must be between \S+ and \S+, got", str(error)), error
        return True
    return False


@given(st.sampled_from(_FLOATS), _NUMBERS)
def test_what_is_accepted_is_finite_in_float32_and_no_divisor_vanishes(name: str, value: float) -> None:
    if refused(name, value):
        return
    single = np.float32(value)
    assert np.isfinite(single)
    assert abs(single) <= 100
    if name == "repetition_penalty" or (name == "temperature" and value >= 1e-6):  # below SGLang takes the likeliest
        assert np.isfinite(np.float32(1e30) / single)  # of what SGLang puts for an infinite logit


@given(st.sampled_from(_COUNTS), st.sampled_from([2**31, -(2**31) - 1, 2**63]) | st.integers(-(2**70), 2**70))
def test_what_is_accepted_is_an_int32(name: str, value: int) -> None:
    assert refused(name, value) or -(2**31) <= value < 2**31


# Each combination that is accepted is a row; one of its logits is as far off as they come, and in half of the rows a
# grammar leaves no token at all.
SAMPLED = """
import itertools, json, torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.async_probe import sanitize_nan_logits
from kimi_w4a8_eagle3.sglang_plugin.http.request_guard import check_numbers

def accepted(name):
    for value in EDGES:
        try:
            check_numbers({name: value}, 64)
        except ValueError:
            continue
        yield value

names = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty")
rows = [SamplingParams(**dict(zip(names, values))) for values in itertools.product(*map(accepted, names))]
for row in rows:
    row.verify(64)
column = lambda name: torch.tensor([[getattr(row, name)] for row in rows], dtype=torch.float32)
torch.manual_seed(1)
logits = torch.randn(len(rows), 64)
logits[:, 3], logits[:, 4] = 1e4, -1e4
logits -= column("frequency_penalty") * 262144
apply_scaling_penalties(logits, column("repetition_penalty").expand_as(logits).contiguous())
logits[::2] = float("-inf")
sanitize_nan_logits(logits)
probs = torch.softmax(logits / column("temperature"), dim=-1)
tokens = top_k_top_p_min_p_sampling_from_probs_torch(
    probs, torch.tensor([row.top_k for row in rows], dtype=torch.int32), column("top_p").view(-1),
    column("min_p").view(-1), True, None, torch.zeros(len(rows), dtype=torch.long)
)
print(json.dumps({"rows": len(rows), "sound": bool(((0 <= tokens) & (tokens < 64)).all())}))
"""


def test_sglangs_sampling_takes_every_combination_of_what_is_accepted() -> None:
    edges = [edge for edge in _EDGES if math.isfinite(edge)]
    answer = found(f"EDGES = {edges}\n{SAMPLED}")
    assert answer["sound"]
    assert answer["rows"] > 1000

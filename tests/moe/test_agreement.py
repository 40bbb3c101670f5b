"""The check that decides on hardware whether the kernels may serve: it passes what is right and finds what is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.moe_faults import FAULTS

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe import reference
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.layer_check import TOLERANCE, require_layer
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.tiles import bucket_of, buckets
from kimi_w4a8_eagle3.quark.weight_format import MXFP4, WeightFormat
from kimi_w4a8_lab.kernels.agreement import agreements, batches
from kimi_w4a8_lab.kernels.random_layers import random_layer

SHAPE = MoeShape(num_experts=6, hidden=208, inter=80, top_k=3)
CPU = torch.device("cpu")


def check(backend: ReferenceBackend, tokens: int = 7) -> list[float]:
    return [agreement.worst for agreement in agreements(backend, SHAPE, [tokens], CPU)]


@pytest.mark.parametrize("shape", [SHAPE, MoeShape(16, 512, 64, 8), MoeShape(8, 128, 64, 4, weights=MXFP4)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_reference_gives_the_known_answers(shape: MoeShape, tokens: int) -> None:
    """The known answers were computed without a product, a scale's quotient or a SiLU."""
    assert [agreement.worst for agreement in agreements(ReferenceBackend(), shape, [tokens], CPU)] == [0.0]


@pytest.mark.parametrize("channel", [0, 3, 79, 80, 83, 159], ids=lambda n: f"{'gate' if n < 80 else 'up'} {n % 80}")
def test_one_unit_in_one_accumulator_of_stage_1_is_found(monkeypatch: pytest.MonkeyPatch, channel: int) -> None:
    plant_a_unit(monkeypatch, stage=1, channel=channel)
    with pytest.raises(KimiError, match="values are wrong"):
        check(ReferenceBackend())


def test_one_unit_in_one_accumulator_of_stage_2_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_a_unit(monkeypatch, stage=2, channel=101)
    with pytest.raises(KimiError, match=r"T=7: 1 values are wrong, first token \d, channel 101"):
        check(ReferenceBackend())


def plant_a_unit(monkeypatch: pytest.MonkeyPatch, stage: int, channel: int) -> None:
    """In the first row of the first expert, of one batched product in two."""
    exact, calls = reference.exact_matmul, []

    def planted(a: torch.Tensor, w: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
        calls.append(a)
        sums = exact(a, w, weights)
        sums[0, 0, channel] += len(calls) % 2 == stage % 2
        return sums

    monkeypatch.setattr(reference, "exact_matmul", planted)


class Planted(ReferenceBackend):
    """A fault in what a forward is given or gives."""

    def __init__(self, change: Callable) -> None:
        self.change = change

    def forward(self, x, moe, router, ids):
        return self.change(super().forward, x, moe, router, ids)


@pytest.mark.parametrize("experts", [6, 33])  # 33: more than the reference takes at a time
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_layer_is_tried_expert_by_expert_when_it_is_loaded(fault: str | None, experts: int) -> None:
    shape = replace(SHAPE, num_experts=experts)
    weights, backend = random_layer(shape, CPU), Planted(FAULTS[fault]) if fault else ReferenceBackend()
    prepared = backend.prepare(weights)
    if fault is None:
        require_layer("layer 7", backend, prepared, weights)
        return
    with pytest.raises(KimiError, match=r"layer 7, expert \d+ on reference: .*% away from the reference"):
        require_layer("layer 7", backend, prepared, weights)


@pytest.mark.parametrize(
    ("tokens", "factor", "passes"),
    [(slice(0, None, 4), 1.006, True), (slice(0, None, 4), 1.02, False), (slice(None), 1.006, False)],
    ids=["one token a little", "one token", "all tokens a little"],
)
def test_a_gpus_exp_may_move_a_token_but_not_an_expert(tokens: slice, factor: float, passes: bool) -> None:
    """The first of the four tokens of each expert has an element of `h` that is rounded to the neighbouring integer."""

    def moved(forward, *call):
        out = forward(*call).float()
        out[tokens] *= factor
        return out.bfloat16()

    weights, backend = random_layer(SHAPE, CPU), Planted(moved)
    with nullcontext() if passes else pytest.raises(KimiError, match="away from the reference"):
        require_layer("layer 7", backend, backend.prepare(weights), weights)


def flipped_nibble(forward, x, moe, router, ids):
    w2 = moe.w2.clone()
    w2[ids[ids >= 0][0].item(), 5, 7] ^= 1
    return forward(x, replace(moe, w2=w2), router, ids)


def test_the_slack_is_the_random_numbers_alone() -> None:
    """A forward in bfloat16 scales is within the tolerance of random numbers, and known answers do not see it."""

    def rounded(forward, x, moe, router, ids):
        return forward(x, replace(moe, s2=moe.s2.bfloat16().float()), router, ids)

    assert 0 < check(Planted(rounded))[0] < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        flipped_nibble,
        FAULTS["last tile of K dropped"],
        FAULTS["gate and up exchanged"],
        lambda forward, x, moe, router, ids: forward(x, moe, router, ids.roll(1, 0)),
        lambda forward, x, moe, router, ids: forward(x, moe, router.roll(1, 1), ids),
        lambda forward, x, moe, router, ids: forward(x, moe, router, ids.clamp(min=0)),
        lambda forward, x, moe, router, ids: forward(x, replace(moe, s13=moe.s13.roll(1, 1)), router, ids),
        lambda forward, x, moe, router, ids: forward(x, replace(moe, s2=moe.s2.roll(1, 1)), router, ids),
        lambda forward, x, moe, router, ids: forward(x.where(x.abs() < 127, 0), moe, router, ids),
    ],
    ids=[
        *("a nibble", "last tile", "gate and up", "tokens", "router weights"),
        *("absent slots", "scales 1", "scales 2", "largest value"),
    ],
)
def test_a_fault_changes_the_known_answers(change: Callable) -> None:
    with pytest.raises(KimiError, match="values are wrong"):
        check(Planted(change))


def test_another_experts_scale_is_found() -> None:
    with pytest.raises(KimiError, match=r"values are wrong|of its norm away"):
        check(Planted(FAULTS["scale of another expert"]))


def test_a_neighbours_row_scale_is_found() -> None:
    """The known answers have one scale for all rows."""
    with pytest.raises(KimiError, match="of its norm away"):
        check(Planted(FAULTS["row scale of a neighbour"]))


@pytest.mark.parametrize(
    "change",
    [lambda gate: gate.relu(), lambda gate: gate * torch.sigmoid(1.702 * gate), lambda gate: gate * torch.nan],
    ids=["relu", "gelu", "nan"],
)
def test_another_activation_is_seen_by_the_random_numbers(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    """The known answers saturate SiLU; what it does elsewhere is compared with the reference."""
    silu = reference.silu

    def forward(inner, x, moe, router, ids):
        known = torch.equal(moe.s13, moe.s13.log2().round().exp2())
        monkeypatch.setattr(reference, "silu", silu if known else change)
        out = inner(x, moe, router, ids)
        monkeypatch.setattr(reference, "silu", silu)
        return out

    with pytest.raises(KimiError, match=r"token \d is .*% of its norm away"):
        check(Planted(forward))


@pytest.mark.parametrize("backend", ["flydsl", "triton"])
def test_every_bucket_of_the_tile_table_is_tried_at_both_ends(backend: str) -> None:
    tried = batches(backend)
    assert {bucket_of(backend, tokens) for tokens in tried} == set(buckets(backend))
    assert set(buckets(backend)[:-1]) <= set(tried)

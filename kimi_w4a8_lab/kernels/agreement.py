"""Check that a backend computes what the contract says on this device, eagerly and replayed from a captured graph.

Two checks run. `KnownLayer` gives outputs that are known without computing them: every intermediate is a small integer
times a power of two, so no format rounds. The output must be equal bit for bit, in whatever order a kernel adds, and an
error of one unit in one accumulator of either stage shows. Random numbers are compared with the reference backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from kimi_w4a8_eagle3.moe.contract import INT8_MAX, MoeBackend, MoeShape, PreparedMoe, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.layer_check import ONE_TOKEN, TOLERANCE, wrong_results
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.tiles import buckets
from kimi_w4a8_eagle3.quark.packing import pack_codes, pack_reorder

from .random_layers import random_batch, random_layer

# Tokens of a decode batch, a verify step, both sides of the sorting kernel's limit, and a prefill chunk.
_FIXED = (1, 8, 160, 256, 257, 10240)
_SMALL = 15  # largest value that reaches the output: the sum of eight, halved, fits bfloat16's 8 bits
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KernelAgreement:
    """A batch that agrees. worst: the largest distance of a token from the reference, as a part of its norm."""

    tokens: int
    worst: float


class KnownLayer:
    """A layer whose outputs are known: its dense weights, all of the format's, cancel except for one weight a row.

    A token is `x = (r, r)`. A weight row is `(v, -v)` with one weight changed by one, so its accumulator is +-r[j].
    Gates see r[1] = 1 and a scale that saturates SiLU, so stage 1 gives +-r[j]. The largest element is r[0] = +-127,
    which makes its row's scale 1. Channels i and i + I/2 are alike, and stage 2 picks one with a small r[j] in the same
    way. With blocks, both halves of a row have the same random shifts, and the scale undoes that of the changed weight.
    """

    def __init__(self, shape: MoeShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._generator = torch.Generator(device).manual_seed(1)
        e, h, half, pairs = shape.num_experts, shape.hidden, shape.hidden // 2, shape.inter // 2
        # Pair 0 takes r[0]. Half of the other pairs take a small element of r, the rest take any other element.
        element = self._integers(half // 2, half, e, pairs)
        element[:, 1 : pairs // 2] = self._integers(2, half // 2, e, pairs // 2 - 1)
        element[:, 0] = 0
        unit = self._signs(e, pairs)
        gate_element = torch.ones(e, shape.inter, dtype=torch.int64, device=device)
        picked, sign = self._integers(1, pairs // 2, e, h), self._signs(e, h)
        elements, units = torch.cat([gate_element, element.repeat(1, 2)], 1), torch.ones_like(gate_element)
        units = torch.cat([units.to(unit.dtype), unit.repeat(1, 2)], 1)
        w13, shift13, undo13 = self._cancelling(half, elements, units)
        w2, shift2, undo2 = self._cancelling(pairs, picked, sign)
        exponent = self._integers(5, 8, e, shape.inter).float()
        s13 = torch.cat([exponent.exp2(), (-exponent).exp2()], dim=1)
        self.column_scale = self._integers(-8, -5, h).float().exp2()
        self.element = element.gather(1, picked)  # [E, H]: index of the element of r that an output shows
        self.sign = sign * unit.gather(1, picked)
        self.weights = QuarkMoeWeights(shape, w13, w2, s13 * undo13, self.column_scale * undo2, shift13, shift2)

    def batch(self, tokens: int, seed: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return ((x, router weights, expert ids), expected bfloat16 [T, H]); a fifth of the ids is -1."""
        self._generator.manual_seed(seed)
        half, slots = self.shape.hidden // 2, (tokens, self.shape.top_k)
        row = self._integers(1, INT8_MAX + 1, tokens, half)
        row[:, 2 : half // 2] = self._integers(1, _SMALL + 1, tokens, half // 2 - 2)
        row *= self._signs(tokens, half)
        row[:, 0], row[:, 1] = INT8_MAX * self._signs(tokens), 1
        ids = torch.rand(tokens, self.shape.num_experts, device=self.device, generator=self._generator)
        ids = ids.topk(self.shape.top_k, dim=1).indices
        ids[self._integers(0, 5, *slots) == 0] = -1
        router = self._integers(-1, 1, *slots).float().exp2()
        expected = torch.zeros(tokens, self.shape.hidden, device=self.device)
        for slot in range(self.shape.top_k):
            expert = ids[:, slot].clamp(min=0)
            shown = row.gather(1, self.element[expert]) * self.sign[expert]
            expected += shown * (router[:, slot] * (ids[:, slot] >= 0))[:, None]
        x = row.repeat(1, 2).bfloat16()
        return (x, router, ids.int()), (expected * self.column_scale).bfloat16()

    def _cancelling(
        self, half: int, element: torch.Tensor, unit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return rows (v, -v) whose weight half + element [E, N] is larger by `unit`: codes, shifts, scale factors."""
        stored, rows = self.shape.weights, element.shape
        both_signs = [value for value in stored.integers if -value in stored.integers]
        table = torch.tensor(both_signs, dtype=torch.int8, device=self.device)
        values = table[self._integers(0, len(both_signs), *rows, half)]
        changed = element[..., None]
        values.scatter_(2, changed, self._integers(-3, 4, *rows, 1, dtype=torch.int8))  # all have neighbours
        weights = torch.cat([values, -values], dim=2).scatter_add_(2, half + changed, unit[..., None])
        if stored.block is None:
            return pack_reorder(weights), None, torch.ones(rows, device=self.device)
        shift = self._integers(0, 8, *rows, half // stored.block, dtype=torch.uint8)
        undo = (-shift.gather(2, changed // stored.block)[..., 0].float()).exp2()
        return pack_codes(weights), torch.cat([shift, shift], dim=2), undo

    def _signs(self, *size: int) -> torch.Tensor:
        return self._integers(0, 2, *size, dtype=torch.int8) * 2 - 1

    def _integers(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=dtype, device=self.device, generator=self._generator)


def batches(backend: str) -> list[int]:
    """Return the batch sizes at both ends of every bucket of the tile table, and others where the code path changes."""
    bounds = buckets(backend)[:-1]
    return sorted({*_FIXED, *bounds, *(bound + 1 for bound in bounds)})


def agreements(
    backend: MoeBackend, shape: MoeShape, tokens: Iterable[int], device: torch.device
) -> Iterator[KernelAgreement]:
    """Check each batch size eagerly and, on a GPU, from a captured graph that is replayed with other numbers.

    Raises KimiError for the first batch that differs, with the token, the channel and both values.
    """
    known, drawn, reference = KnownLayer(shape, device), random_layer(shape, device), ReferenceBackend()
    known_moe, drawn_moe = backend.prepare(known.weights), backend.prepare(drawn)
    expected_moe = reference.prepare(drawn)
    for count in tokens:
        first, answer = known.batch(count, seed=count)
        _require_equal(backend.forward(first[0], known_moe, *first[1:]), answer, f"T={count}")
        if device.type == "cuda":
            replay = _captured(backend, known_moe, *first)
            other, answer = known.batch(count, seed=count + 1)
            _require_equal(replay(*other), answer, f"T={count}, replayed from a graph")
        x, router, ids = random_batch(shape, count, device)
        expected = reference.forward(x, expected_moe, router, ids).float()
        away = (backend.forward(x, drawn_moe, router, ids).float() - expected).norm(dim=1) / expected.norm(dim=1)
        worst, middle = float(away.max()), float(away.median())
        if not worst <= ONE_TOKEN:  # also true for NaN
            token = int(away.nan_to_num(torch.inf).argmax())
            raise wrong_results(
                f"T={count}: token {token} is {worst:.2%} of its norm away from the reference", ONE_TOKEN
            )
        if middle > TOLERANCE:
            what = f"T={count}: half of the tokens are {middle:.2%} of their norm away from the reference"
            raise wrong_results(what, TOLERANCE)
        yield KernelAgreement(count, worst)


def _captured(backend: MoeBackend, moe: PreparedMoe, *inputs: torch.Tensor) -> Forward:
    """Capture a graph and return a forward that copies its arguments to the graph's inputs and replays it.

    `inputs` must have run eagerly before.
    """
    static = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(static[0], moe, *static[1:])

    def replay(*arguments: torch.Tensor) -> torch.Tensor:
        for to, value in zip(static, arguments, strict=True):
            to.copy_(value)
        graph.replay()
        return out

    return replay


def _require_equal(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if not torch.equal(found, expected):
        wrong = (found != expected).nonzero()
        token, channel = wrong[0].tolist()
        values = f"{float(found[token, channel])} instead of {float(expected[token, channel])}"
        raise wrong_results(
            f"{where}: {len(wrong)} values are wrong, first token {token}, channel {channel}: {values}", 0
        )

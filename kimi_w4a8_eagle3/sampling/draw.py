"""Draw one token per row: SGLang's top-k, top-p and min-p, then an exponential race on counter noise.

The token with the smallest E / p wins, where E is exponential noise of (seed, position, token). That is a draw from p,
also when p is not normalized after a filter. `draw` runs a Triton kernel on a GPU and numpy on a CPU. The two use the
same random words and differ in rounding alone.

A filter is a threshold on p, so tokens whose probability equals that of the last one kept are kept too. top_k = 1 is
greedy: the first of the most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .philox import philox


@dataclass(frozen=True)
class Filters:
    """Sampling filters of each row.

    top_k: int32 [R], 1 is greedy. top_p, min_p: float32 [R]. active: False when no row filters at all.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    active: bool = True

    def repeated(self, times: int) -> Filters:
        """Repeat each row `times` times, for the positions that a verify step draws at."""
        top_k, top_p, min_p = (tensor.repeat_interleave(times) for tensor in (self.top_k, self.top_p, self.min_p))
        return Filters(top_k, top_p, min_p, self.active)


def draw(probs: torch.Tensor, filters: Filters, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the token drawn from each row, int64 [R], the type that `verify_tree_greedy` takes.

    probs: float32 [R, V], softmax of the logits over the temperature. seeds: int64 [R]. positions: int64 [R], the index
    of the row's last input token in its sequence.
    """
    tensors = probs, filters.top_k, filters.top_p, filters.min_p, seeds, positions
    if probs.device.type != "cpu":
        from .triton_draw import launch  # start-up: Triton, which a CPU does not need

        return launch(*tensors, filtered=filters.active)
    return torch.from_numpy(draw_rows(*(tensor.numpy() for tensor in tensors)))


def draw_rows(
    probs: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    seeds: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Draw in numpy, int64 [R]; the kernel is tested against this definition.

    float64 noise makes the winner independent of how a row of numbers is split over vector instructions.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        race = _exponential(seeds, positions, probs.shape[1]) / probs
    race[probs < _thresholds(probs, top_k, top_p, min_p)[:, None]] = np.inf
    race[~(probs > 0)] = np.inf
    tokens = race.argmin(axis=1)
    greedy = top_k == 1
    tokens[greedy] = probs[greedy].argmax(axis=1)
    return tokens


def _exponential(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
    """Return exponential noise float64 [R, size]; token t takes word t // q of counter t % q, q = ceil(size / 4)."""
    words = np.concatenate(philox(seeds, positions, -(-size // 4)), axis=1)[:, :size]
    return -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32)


def _thresholds(
    probs: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Return the smallest probability that each row's filters keep, float32 [R]."""
    thresholds = np.zeros(len(probs), np.float32)
    for row in np.flatnonzero((top_k < probs.shape[1]) | (top_p < 1) | (min_p > 0)):
        ordered = np.sort(probs[row])[::-1]
        before = np.cumsum(ordered, dtype=np.float64) - ordered
        kept = (np.arange(len(ordered)) < top_k[row]) & ((before <= top_p[row]) | (top_p[row] >= 1))
        thresholds[row] = max(ordered[kept][-1], ordered[0] * min_p[row])
    return thresholds

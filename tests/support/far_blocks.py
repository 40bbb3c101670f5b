"""MXFP4 layers whose rows span many octaves, and their result in float64 from the values of the files."""

from __future__ import annotations

import torch

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.reference import quantize_rows
from kimi_w4a8_eagle3.quark.packing import fold_layer, unpack_codes


class FarLayer:
    """A layer in which block 0 of most rows lies `span` octaves above the others, and a batch.

    All tokens but the first are zero in block 0, and so are all rows of stage 2.
    """

    def __init__(self, shape: MoeShape, span: int) -> None:
        generator = torch.Generator().manual_seed(span)

        def projection(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.randint(0, 256, (shape.num_experts, rows, k // 2), generator=generator, dtype=torch.uint8)
            exponents = torch.full((shape.num_experts, rows, k // 32), 118, dtype=torch.uint8)
            exponents[:, : rows // 4 * 3, 0] += span
            return codes, exponents

        self.stored = projection(2 * shape.inter, shape.hidden), projection(shape.hidden, shape.inter)
        (w13, _), (w2, _) = self.stored
        w13[:, shape.inter : shape.inter + 32] = 0
        self.weights = QuarkMoeWeights.of(shape, w13, w2, fold_layer(*self.stored))
        x = torch.randn(4, shape.hidden, generator=generator).bfloat16()
        x[1:, :32] = 0
        ids = torch.rand(4, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k].int()
        self.batch = x, torch.rand(ids.shape, generator=generator), ids

    def errors(self, found: torch.Tensor) -> torch.Tensor:
        """Return the relative error of each token of `batch`."""
        w13, w2 = (
            (unpack_codes(codes).double().view(*exponents.shape, 32) * (exponents.double() - 128).exp2()[..., None])
            for codes, exponents in self.stored
        )
        (x, router, ids), expected = self.batch, torch.zeros(found.shape, dtype=torch.float64)
        a8, scale = quantize_rows(x)
        for token, slot in torch.ones(ids.shape).nonzero().tolist():
            gate, up = (w13[ids[token, slot]].flatten(1) @ (a8[token].double() * scale[token].double())).chunk(2)
            h8, h_scale = quantize_rows((gate / (1 + (-gate).exp()) * up).float())
            down = w2[ids[token, slot]].flatten(1) @ (h8.double() * h_scale.double())
            expected[token] += router[token, slot].double() * down
        return (found.double() - expected).norm(dim=1) / expected.norm(dim=1)

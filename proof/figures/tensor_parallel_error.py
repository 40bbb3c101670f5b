"""Error of the MoE layer by tensor-parallel size, against unquantized activations and TP 1.

    PYTHONPATH=tests:tests/moe python -m proof.figures.tensor_parallel_error [--hidden 1024] [--inter 2048]

Uses the layer, the slicing and the float reference of tests/moe/test_tensor_parallel.py, which needs tests/support.
"""

from __future__ import annotations

import typer
from test_tensor_parallel import forward, random_layer, routed_tokens, unquantized_activations

from kimi_w4a8_eagle3.cli import run


def main(experts: int = 8, hidden: int = 1024, inter: int = 2048, top_k: int = 8, tokens: int = 8) -> None:
    """Print one line for each tensor-parallel size."""
    layer = random_layer(experts, hidden, inter, top_k, seed=0)
    call = routed_tokens(layer.shape, tokens, seed=1)
    exact, first = unquantized_activations(layer, call), forward(layer, 1, call)
    for tp in (1, 2, 4, 8):
        out = forward(layer, tp, call)
        error = float((out - exact).norm() / exact.norm())
        moved = float((out - first).norm() / first.norm())
        typer.echo(f"TP {tp}: {error:.2e} from unquantized activations, {moved:.2e} from TP 1")


if __name__ == "__main__":
    run(lambda: typer.run(main))

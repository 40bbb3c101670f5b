"""The published vLLM sweep as commands: `vllm bench serve` at 1K in / 1K out, five concurrencies.

The published command cannot run on vLLM's releases as printed: `vllm bench serve` has no `--use-chat-template`, and it
spreads lengths by `--random-range-ratio` R over (1 - R)..(1 + R) times the target, which at R = 0.8 asks for more
tokens than `--max-model-len` allows. Both are InferenceX's: its client spreads over R..1 times the target and applies
the chat template itself. `bench_command` renders that workload with vLLM's own options.
"""

from __future__ import annotations

from ..base.errors import KimiError
from ..recipe.arguments import Args, command_words
from ..recipe.launch import Launch

CONCURRENCIES = (4, 8, 16, 32, 64)
TOKENS = 1024
SHORTEST = 0.8
PROMPTS_PER_STREAM, WARMUPS_PER_STREAM = 10, 2


def bench_command(launch: Launch, concurrency: int, seed: int = 0) -> list[str]:
    """`vllm bench serve` against a running `launch`: prompts through the chat template, lengths of 0.8 to 1 K."""
    middle, spread = length_range(TOKENS, SHORTEST)
    return [
        *_program(launch),
        *command_words(
            {
                "base-url": launch.base_url,
                "backend": "openai-chat",  # the server applies the chat template
                "endpoint": "/v1/chat/completions",
                "dataset-name": "random",
                "random-input-len": middle,
                "random-output-len": middle,
                "random-range-ratio": spread,
                **_load(concurrency),
                "num-warmups": WARMUPS_PER_STREAM * concurrency,
                "request-rate": "inf",
                "ignore-eos": True,
                "trust-remote-code": True,
                "seed": seed,
            }
        ),
    ]


def length_range(target: int, shortest: float) -> tuple[int, float]:
    """vLLM's length and range ratio for lengths from `shortest * target` to `target`: the middle and its spread."""
    low = shortest * target
    middle = round((low + target) / 2)
    return middle, int((target / middle - 1) * 10_000) / 10_000


def _program(launch: Launch) -> list[str]:
    if launch.engine != "vllm":
        raise KimiError(f"the recipe {launch.name!r} serves with {launch.engine}", expected="a recipe for vLLM")
    return ["vllm", "bench", "serve", "--model", launch.model]


def _load(concurrency: int) -> Args:
    return {"num-prompts": PROMPTS_PER_STREAM * concurrency, "max-concurrency": concurrency}

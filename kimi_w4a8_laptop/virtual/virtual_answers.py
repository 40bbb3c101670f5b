"""`python -m kimi_w4a8_laptop.virtual.virtual_answers FILE [--draft]`: answers of the built-in model.

With the environment of `virtual.ENVIRONMENT` the engine runs SGLang's HIP path, otherwise its CPU path. FILE gets the
tokens of each request as JSON. Compare the files of two engines to compare the engines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.sglang_plugin import run_module  # noqa: F401  (installs the operators before SGLang's import)

from .. import tiny, virtual

QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many apples does Tom have?",
    "What is the capital of France?",
    "Anna had 12 pens. She gave 5 to Ben. How many pens are left?",
    "Write a list of three colours.",
)
_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SEEDED: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 7}
# One batch of four requests for each kind. No grammars: the door tries them, and only a server has a door.
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [_GREEDY] * 4,
    "seeded": [{**_SEEDED, "top_p": 0.95}, {**_SEEDED, "top_k": 20}, {**_SEEDED, "min_p": 0.05}, _SEEDED],
    "mixed": [
        {**_GREEDY, "frequency_penalty": 0.8, "repetition_penalty": 1.2, "min_new_tokens": 8},
        {**_SEEDED, "presence_penalty": 0.5},
        {**_SEEDED, "temperature": 0.6, "repetition_penalty": 1.1},
        _GREEDY,
    ],
}


def arguments(draft: bool) -> dict[str, Any]:
    """Return the engine's arguments: those of recipe `agent` that a small machine can run."""
    weights = Path(tiny.__file__).parent / "weights"
    common = {
        "model_path": str(weights / "target-w4a8"),
        "trust_remote_code": True,
        "context_length": 4096,
        "max_total_tokens": 8192,
        "max_running_requests": 8,
        "mem_fraction_static": 0.3,
        "disable_cuda_graph": True,
        "disable_custom_all_reduce": True,
        "skip_server_warmup": True,
        "watchdog_timeout": 1800,
        "log_level": "warning",
    }
    path = ("cuda", "aiter") if virtual.wanted() else ("cpu", "intel_amx")
    drafts = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(weights / "draft"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    return {**common, "device": path[0], "attention_backend": path[1], **(drafts if draft else {})}


def ask(draft: bool, tokens: int) -> dict[str, Any]:
    """Start an engine, ask each kind as one batch, and return its tokens by kind."""
    import sglang  # start-up: after the operators
    from transformers import AutoTokenizer

    settings = arguments(draft)
    tokenizer = AutoTokenizer.from_pretrained(settings["model_path"], trust_remote_code=True)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    engine = sglang.Engine(**settings)
    try:
        found: dict[str, Any] = {"tokens": {}}
        for kind, params in KINDS.items():
            rows = engine.generate(
                input_ids=[list(map(int, prompt)) for prompt in prompts],
                sampling_params=[{"max_new_tokens": tokens, **given} for given in params],
            )
            found["tokens"][kind] = [row["output_ids"] for row in rows]
        return found
    finally:
        engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft", action="store_true", help="with EAGLE3 drafts, 3/1/4")
    options = parser.parse_args()
    options.file.write_text(json.dumps(ask(options.draft, tokens=16)))

"""`run_module kimi_w4a8_eagle3.sglang_plugin.bench_prompts OUTPUT ARGS`: write the load generator's prompts.

ARGS are the generator's own options. SGLang's dataset code runs with the same seeds and therefore makes the same texts.
OUTPUT gets them as JSON lines. They tell how repetitive a workload is, and acceptance is probed with them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from sglang.benchmark.datasets import get_dataset
from sglang.benchmark.utils import get_tokenizer


def main(output: str, words: list[str]) -> None:
    """Write one JSON line `{"prompt": ..., "prompt_len": ...}` per request."""
    parser = argparse.ArgumentParser()
    for name in ("--dataset-name", "--dataset-path", "--tokenizer"):
        parser.add_argument(name, required=True)
    for name in ("--num-prompts", "--seed"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--random-input-len", "--random-output-len", "--sharegpt-output-len", "--sharegpt-context-len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--random-range-ratio", type=float, default=1.0)
    parser.add_argument("--prompt-suffix", default="")
    parser.add_argument("--apply-chat-template", action="store_true")
    args, _ = parser.parse_known_args(words)

    random.seed(args.seed)
    np.random.seed(args.seed)
    rows = get_dataset(args, get_tokenizer(args.tokenizer))
    lines = (json.dumps({"prompt": row.prompt, "prompt_len": row.prompt_len}) for row in rows)
    Path(output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

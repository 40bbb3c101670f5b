"""Cost of a step by kind of request, counted on the virtual node. The figures of docs/virtual-node.md.

    PYTHONPATH=tests python -m support.virtual_steps [--save]

Counts steps without new requests, plain and with drafts, at batch 1 and 40. It compares the counts with
virtual_steps.json, or writes them there. Draws are by the reference: 160 rows take Triton's interpreter seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from kimi_w4a8_eagle3.base.http import bearer
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_laptop.virtual import library

from .virtual_servers import virtual_server

SAVED = Path(__file__).with_suffix(".json")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 3},
    "penalized": {"temperature": 0.0, "frequency_penalty": 0.5, "min_new_tokens": 4},
}
_TOKENS = {1: 20, 40: 14}  # of an answer, by batch
_LISTED = ("synchronization", "pageable copy", "host copy")
Step = dict[str, Any]


def steps_of(server: EngineServer, file: Path, kind: str, requests: int) -> Step:
    """Return the most frequent counts of a step with that many requests of a kind, after the first such step."""
    before = len(file.read_text().splitlines())
    params = {**KINDS[kind], "max_new_tokens": _TOKENS[requests], "ignore_eos": True}
    # All in one body, so that they decode together on a busy machine, too.
    body = {"input_ids": [[9 + number % 20, *range(20, 40)] for number in range(requests)], "sampling_params": params}
    httpx.post(f"{server.base_url}/generate", json=body, headers=bearer(server.secret), timeout=280).raise_for_status()
    lines = [json.loads(line) for line in file.read_text().splitlines()[before:]]
    same = [
        step
        for earlier, step, later in zip(lines, lines[1:], lines[2:], strict=False)
        if all(one["requests"] == requests and one["mode"] == "DECODE" for one in (earlier, step, later))
    ]
    found = Counter(json.dumps(counts_of(step), sort_keys=True) for step in same)
    most: Step = json.loads(found.most_common(1)[0][0])
    return most | {"python calls": min(step["python calls"] for step in same)}


def counts_of(step: Step) -> Step:
    """Return the sums by kind, and the operators of what a step should not have."""
    counts: dict[str, dict[str, int]] = step["counts"]
    sums = {kind: sum(counts.get(kind, {}).values()) for kind in ("launch", "allocation", *_LISTED)}
    return sums | {"of them": {kind: counts[kind] for kind in _LISTED if kind in counts}}


def steps(title: str, folder: Path) -> dict[str, dict[str, Step]]:
    """Return the steps of an engine without or with drafts, by batch and kind."""
    file = folder / "steps"
    folder.mkdir()
    file.touch()
    settings = ("max-running-requests=40", f"cuda-graph-bs-decode={[*_TOKENS]}")
    environ = {"KIMI_VIRTUAL_COUNTS": str(file), "module": "support.step_counts", library.DRAW: "reference"}
    with virtual_server(title == "drafts", folder, *settings, **environ) as server:
        return {str(batch): {kind: steps_of(server, file, kind, batch) for kind in KINDS} for batch in _TOKENS}


def main() -> None:
    titles = ("plain", "drafts")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        found = dict(zip(titles, pool.map(lambda title: steps(title, Path(name) / title), titles), strict=True))
    for title, requests, kind in product(found, map(str, _TOKENS), KINDS):
        print(title, requests, kind, json.dumps(found[title][requests][kind]))
    if "--save" in sys.argv:
        SAVED.write_text(json.dumps(found, indent=1) + "\n")
    elif different := differences(json.loads(SAVED.read_text()), found):
        sys.exit(f"a step costs something else than {SAVED.name} says: {', '.join(different)}")


def differences(saved: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return where counts differ, or where Python calls are over a tenth more."""
    out = []
    for title, requests, kind in product(found, map(str, _TOKENS), KINDS):
        step, wanted = found[title][requests][kind], saved[title][requests][kind]
        more = step["python calls"] > 1.1 * wanted["python calls"]
        if more or {**step, "python calls": 0} != {**wanted, "python calls": 0}:
            out.append(f"{title} {requests} {kind}")
    return out


if __name__ == "__main__":
    main()

"""docs/security.md and docs/request-limits.md give the limits that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.door import (
    admission,
    bodies,
    computed,
    connections,
    large,
    pictures,
    rules,
    schemas,
    settings,
    shape,
    shares,
    trial,
)
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.sglang_plugin.http.request_guard import _RANGES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "security.md").read_text() + (DOCS / "request-limits.md").read_text()
PAGE, ROWS = " ".join(TEXT.split()), [row for row in TEXT.splitlines() if row[:1] == "|"]
LIMITS = {
    "bodies": f"{bodies.DEADLINE_S:.0f} s for the body (408)",
    "silent bodies": f"loses its memory after {bodies._GRACE_S:g} to {bodies._GRACE_S + bodies._LOOK_S:g} s",
    "charges": f"An answer costs {shares.ANSWER_S * 1e6:g} s for each MB",
    "headers": f"{connections.BoundedProtocol.deadline_s:.0f} s for the headers",
    "rest of a request": f"still sends {connections.BoundedProtocol.deadline_s:.0f} s after the answer",
    "size of headers": f"| size of the headers | {connections.BoundedProtocol.max_header_bytes >> 10} KiB",
    "memory of bodies": f"at most {shares.BODIES} x `KIMI_MAX_BODY_BYTES` for all unanswered requests together",
    "places": f"A worker first has {admission.QUICK_S} s of CPU time, which most rows",
    "waiting": f"What waits for {shares._QUEUE_S:.0f} s gets 503",
    "answers": "An answer is reused for 20 times the time that it took, at most for 1 s. More than 16 different queries"
    if (computed._SHARE, computed._MOST_S, computed._MAX_QUERIES) == (20, 1, 16)
    else "other limits",
    "shape": f"{shape.MAX_DEPTH} levels deep, with {shape.MAX_LIST:,} entries in each array or object",
    "text": f"{rules._CHARACTERS_PER_TOKEN} characters for each token of the context |",
    "many prompts": f"| {rules._BATCH_TOKENS:,} tokens together, or the context if it is longer",
    "long texts": f"first counts the tokens of a text of more than {large.COUNTED_CHARACTERS:,} characters",
    "candidates": f"| {rules._MAX_TOP_LOGPROBS} candidates |",
    "logprobs": f"at most {rules.MAX_LOGPROBS:,}, and {rules.MAX_WHOLE_LOGPROBS:,} in an answer that is not streamed",
    "stop": f"{rules._MAX_STOPS} strings of {rules._MAX_LABEL:,} characters",
    "tools": f"{schemas._MAX_TOOL_OBJECTS:,} objects in all their schemas",
    "two threads": {(2, 1): "the plugin runs this in two threads"}[large.THREADS, shares.KEPT],
    "default body": f"| `KIMI_MAX_BODY_BYTES` | {DoorSettings().max_body_bytes} |",
    "default sequences": f"| `KIMI_MAX_SEQUENCES` | {DoorSettings().max_sequences} |",
    "default mask": f"| `KIMI_MAX_MASK_MS` | {DoorSettings().max_mask_ms} |",
    "key": f"A key has {settings._MIN_KEY} or more visible ASCII characters",
    "reading": f"at most {large._READ_S} s, plus {large._PICTURE_S * 1e9:.0f} ns for each character of its pictures",
    "worker for a body": f"first reads a body over {large.WORKER_BYTES >> 10} KiB, or with over "
    f"{large.WORKER_OBJECTS} `{{`. It is killed after {large._CPU_S:.0f} s of CPU time",
    "threads": f"For a request over {large.THREAD_BYTES >> 10} KiB",
    "pictures": f"at most {pictures._MAX_PICTURES} with 2^{pictures.MAX_PIXELS.bit_length() - 1} pixels together",
    "time of pictures": f"It may take {pictures._USUAL_S} s of CPU time and {pictures._PIXEL_S * 1e9:.0f} ns for each "
    f"pixel, and is killed after {pictures._CPU_S:.0f} s",
    "time of grammars": f"| {trial.CPU_S:.0f} s in all, of which {trial._STEP_S:.0f} s for the walk. Then the kernel",
    "wall time": f"| wall time of a worker | {trial.CPU_S * admission._WALL:.0f} s |",
    "memory of a worker": f"| {admission.MEMORY_BYTES >> 30} GiB beyond the zygote's",
    "memory of a grammar": f"| memory of the compiled grammar | {trial.MAX_GRAMMAR_BYTES >> 20} MiB |",
    "mask": f"| {DoorSettings().max_mask_ms} ms (`KIMI_MAX_MASK_MS`) for the slowest mask of the walk |",
    "walk": f"it ends by itself after {trial._WALK_S:.0f} s",
    "body": f"one JSON object of at most {DoorSettings().max_body_bytes >> 20} MiB (`KIMI_MAX_BODY_BYTES`; else 413)",
    "verdicts": f"The last {admission._MAX_VERDICTS:,} verdicts are kept",
    "repeats": f"As its last step the walk repeats characters {trial._REPEATS} times",
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_the_page_gives_the_limit(limit: str) -> None:
    assert limit in PAGE


@pytest.mark.parametrize("name", sorted(_RANGES.keys() - {"max_new_tokens", "min_new_tokens", "stream_interval"}))
def test_the_page_gives_the_range(name: str) -> None:
    low, high = _RANGES[name]
    words = {2.0**-126: "2^-126", 2**31 - 1: "2^31 - 1"}
    first = "-1 (all)" if name == "top_k" else words.get(low, f"{low:g}")
    row = next(row for row in ROWS if f"`{name}`" in row.split("|")[1] and " to " in row)
    assert row.split("|")[2].strip() == f"{first} to {words.get(high, f'{high:g}')}"

"""docs/security.md gives the limits that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_w4a8_eagle3.door import admission, bodies, large, pictures, trial
from kimi_w4a8_eagle3.door.settings import DoorSettings

PAGE = " ".join((Path(__file__).parents[2] / "docs/security.md").read_text().split())
LIMITS = {
    "bodies": f"{bodies.DEADLINE_S:.0f} s for the body (408)",
    "worker for a body": f"it may take {large._READ_S} s of CPU time, plus {large._PICTURE_S * 1e9:.0f} ns a character "
    f"of its pictures. Over {large.WORKER_BYTES >> 10} KiB a child process tries it first",
    "threads": f"For a request over {large.THREAD_BYTES >> 10} KiB",
    "pictures": f"at most {pictures._MAX_PICTURES} with 2^{pictures.MAX_PIXELS.bit_length() - 1} pixels together",
    "time of pictures": f"It may take {pictures._USUAL_S} s of CPU time and {pictures._PIXEL_S * 1e9:.0f} ns for each "
    f"pixel, and is killed after {pictures._CPU_S:.0f} s",
    "time of grammars": f"{trial.CPU_S:.0f} s to compile and {trial._STEP_S:.0f} s to walk, then the kernel kills it. "
    f"It has {trial.CPU_S * admission._WALL:.0f} s of wall time",
    "memory of a worker": f"| {admission.MEMORY_BYTES >> 30} GiB beyond the zygote's",
    "memory of a grammar": f"| memory of the compiled grammar | {trial.MAX_GRAMMAR_BYTES >> 20} MiB |",
    "mask": f"| {DoorSettings().max_mask_ms} ms (`KIMI_MAX_MASK_MS`) for the longest that the walk finds. It ends by "
    f"itself after {trial._WALK_S:.0f} s |",
    "waiting": f"A grammar that waits for {admission._QUEUE_S:.0f} s gets 503",
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_the_page_gives_the_limit(limit: str) -> None:
    assert limit in PAGE

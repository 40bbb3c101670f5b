"""The demo measures its sides in turns: figures by pairs, and what its page says about them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.every_page import Shown
from support.repository import ROOT

from kimi_w4a8_eagle3.engine.client import Generation
from proof.demo import EACH, QUESTIONS, Side, page, paired_figures


def side(tpots: list[float], seconds: list[float], ttft_ms: float = 40.0) -> Side:
    answer = Generation("#### 1", (1, 2, 3), "stop", (), ttft_ms=ttft_ms)
    return Side("W4A8", 1.0, [], [replace(answer, tpot_ms=tpots[n // EACH]) for n in range(QUESTIONS)], seconds)


PLAIN = side([10.0, 12.0, 11.0, 30.0, 10.0], [2.0, 2.0, 2.0, 6.0, 2.0])
FAST = side([5.0, 6.0, 5.5, 15.0, 5.0], [1.0, 1.0, 1.0, 3.0, 1.0], ttft_ms=80.0)


@pytest.mark.server
@pytest.mark.slow
def test_the_demo_ends_in_a_page_of_its_result(tmp_path: Path) -> None:
    shown = Shown.of(tmp_path, "proof.demo")
    answers = [[one["tpot_ms"] for one in shown.stored[side]["answers"]] for side in ("w4a8", "eagle3")]
    tpots = [np.median(np.median(np.reshape(side, (QUESTIONS // EACH, EACH)), axis=1)) for side in answers]
    assert shown.headline.startswith("PASS: EAGLE3 gives the same tokens; TPOT ") and "no GPU" in shown.text
    assert shown.rows["TPOT, ms",][1:3] == [f"{tpot:.1f}" for tpot in tpots]
    assert shown.rows["accept length",][2] == f"{shown.stored['eagle3']['acceptance']['length']:.2f} of 4"
    assert f"{shown.stored['solved']} of {QUESTIONS} held-out problems solved" in shown.text
    (quoted,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = " ".join(map(shape, shown.output.splitlines()))  # a long line is wrapped
    assert [line for line in quoted.splitlines() if shape(line) not in printed] == []


def shape(line: str) -> str:
    """Return a line of the demo without its frame, and without the seconds of a start."""
    return re.sub(r"after \d+ s", "after N s", line.strip("|│ "))


def test_a_slow_minute_of_both_sides_changes_no_ratio() -> None:
    tpot, throughput, ttft = paired_figures(PLAIN, FAST)
    assert (tpot.times.value, tpot.times.low, tpot.times.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (tpot.plain, tpot.fast, throughput.times.value) == pytest.approx((11.0, 5.5, 2.0))
    assert (throughput.plain, ttft.times.value) == (EACH * 3 / 2.0, 0.5)
    mixed = paired_figures(PLAIN, side([5.0, 20.0, 5.5, 60.0, 9.0], FAST.seconds))[0]
    assert mixed.times.covers(1) and mixed.times.value > 1 and mixed.verdict == "the same within its interval"


def test_the_page_names_three_figures_its_scope_and_a_busy_machine() -> None:
    shown, calm = (page(PLAIN, FAST, True, 20, others, Path("demo")) for others in (0.4, 0.05))
    speed = "TPOT 2.00x (better), throughput 2.00x (better), TTFT 0.50x (worse)"
    assert shown.title == f"PASS: EAGLE3 gives the same tokens; {speed}" and "no GPU" in calm.verdicts[0].text
    assert "used 40% of this machine's cores" in shown.verdicts[1].text and len(calm.verdicts) == 1

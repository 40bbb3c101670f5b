"""One page of each kind, with what is wide and what is hostile in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from html import unescape
from pathlib import Path
from typing import Any

from kimi_w4a8_eagle3.engine.client import Generation
from kimi_w4a8_lab.accept import claims
from kimi_w4a8_lab.accept.journal import AcceptResult, Figure, StageResult
from kimi_w4a8_lab.accuracy.results import Accuracy, AccuracyResult, Judgement, Paired
from kimi_w4a8_lab.accuracy.significance import ShareInterval
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_lab.report import evaluation, measured
from kimi_w4a8_lab.report.analysis import Analysis
from kimi_w4a8_lab.report.page import Page, write_page
from kimi_w4a8_lab.speed.measure import TurnFigures
from kimi_w4a8_lab.speed.runs import Run
from proof import demo

# Ends what it may stand in, in a page and in a picture, and then acts.
HOSTILE = "</pre></text></svg>\"'><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
LONG = "How many legs do 6 hens and 3 cows have in all, when nobody counts the farmer's own? " * 3 + HOSTILE + "Y" * 300
Copies = Callable[..., Run]


class Shown:
    """A verb's output and the page that it names: headline, text, rows of tables by first cells, stored result."""

    def __init__(self, output: str, runs: Path) -> None:
        self.output = output
        [folder] = runs.iterdir()
        path = Path(re.findall(r"page: (\S+?\.html)", output.replace("\n", ""))[-1])
        assert path.is_relative_to(folder)
        self.text, self.stored = path.read_text(), json.loads((folder / "result.json").read_text())
        [self.headline] = re.findall(r"<h1[^>]*>([^<]*)", self.text)
        rows = [re.findall(r"<td[^>]*>([^<]*)", row) for row in re.findall(r"<tr><td.*?</tr>", self.text)]
        self.rows = {tuple(map(unescape, row[:size])): row for row in rows for size in (1, 2)}
        assert f"{os.cpu_count()} cores" in self.text and str(date.today().year) in self.text
        assert 'class="lead"><img' in self.text or "bit for bit" in self.headline

    @classmethod
    def of(cls, runs: Path, *words: str) -> Shown:
        """Run a module that starts engines: not in this process, whose threads a fork would not have."""
        program = [sys.executable, "-m", *words, "--runs", str(runs)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return cls(done.stdout, runs)


def every_page(copies: Copies, folder: Path) -> dict[str, Path]:
    """Write the page of each kind of run into a folder of its own."""
    made: dict[str, Page] = {
        "demo": demo_page(copies),
        "bench": measured.page(
            Analysis([copies("a", "tiny:plain", 3.0, 3, acceptance=None), copies("b", "tiny", 1.0, 3)])
        ),
        "turns": page_of_turns(copies),
        "eval": evaluation_page(folder / "run"),
        "accept": claims.page(accepted()),
    }
    return {name: write_page(page, folder / name) for name, page in made.items()}


def demo_page(copies: Copies) -> Page:
    found = copies("demo", "tiny").result.measurements[0]
    answers = [Generation(LONG, (1, 2), "stop", (), (), 30.0 + n, 9.0 + n) for n in range(demo.QUESTIONS)]
    faster = [replace(answer, tpot_ms=answer.tpot_ms / 2) for answer in answers]
    plain = demo.Side("W4A8", 3.0, [], answers, [1.0] * demo.PAIRS)
    fast = demo.Side("W4A8 + EAGLE3", 3.0, [], faster, [0.5, 0.4, 0.5, 0.6, 0.5], found.acceptance)
    return demo.page(plain, fast, True, 20, 0.4, Path("runs/20261123-192843-demo"))


def page_of_turns(copies: Copies) -> Page:
    run = copies("turns", "tiny")
    work = run.result.measurements[0].workload.model_copy(update={"name": f"agent {HOSTILE}"})
    turns = [
        TurnFigures(
            prompt_tokens=400 * turn,
            cached_tokens=390 * (turn - 1),
            ttft_median_ms=900 / turn,
            ttft_p99_ms=1000,
        )
        for turn in range(1, 7)
    ]
    return measured.page(Analysis([copies("conversations", f"tiny {HOSTILE}", workload=work, turns=turns)]))


def evaluation_page(run: Path) -> Page:
    paired = Paired("strict-match", 500, 480, 7, 6, 7, ShareInterval(0.002, -0.008, 0.012), 1.0, 0.01, 0.66, 900)
    verdict = Judgement(
        Verdict.PASS, ["not worse"], problems=500, paired=[paired],
        accuracies=[Accuracy("strict-match", 487, 500, ShareInterval(0.974, 0.956, 0.985))],
        differing=[["3", LONG, "24", "strict-match: new", LONG, ""]],
    )  # fmt: skip
    return evaluation.page(run, accuracy_result(verdict, f"tiny {HOSTILE}"))


def accuracy_result(verdict: Judgement, server: str, **facts: Any) -> AccuracyResult:
    asked: dict[str, Any] = {"requests": {"asked": 500}, "lm_eval": {}, "outcomes": []}
    return AccuracyResult(
        configuration=server, model="kimi", verdict=verdict, **{"task": "tiny-math", **asked, **facts}
    )


def accepted() -> AcceptResult:
    figures = [Figure("TPOT median", 27.4, "ms", 26.1, 27.79), Figure("TTFT median", 812.0, "ms", 790.0)]
    measures = [f"{recipe}: {point}" for recipe in ("agent", "w4a8", "eagle3") for point in ("con2", "con40")]
    results = {name: StageResult(LONG, seconds=60.0, figures=figures) for name in measures}
    results |= {name: StageResult("fine", seconds=9.0) for name in "abcdefghijklmnopqrst"}
    failed = StageResult(HOSTILE, Verdict.FAIL)
    return AcceptResult({"sglang": "1.2"}, {**results, "chat": failed, HOSTILE: results["a"]})

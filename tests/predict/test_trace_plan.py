"""Ranking of layouts: SLO, winner, intervals, page and messages, without a simulation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from support.plans import LAYOUTS, figures, plan
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.cli import app, load
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render
from kimi_w4a8_lab.predict import trace_plan
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Load, calibrate, predict
from kimi_w4a8_lab.predict.simulation import Slo
from kimi_w4a8_lab.predict.step_time import KimiStepTime
from kimi_w4a8_lab.predict.trace_plan import MODEL, variations
from kimi_w4a8_lab.report import traffic_plan
from kimi_w4a8_lab.speed.trace_readers import read_trace

FIT = calibrate(Cluster())


def test_an_slo_has_both_limits() -> None:
    assert Slo.parse("ttft=2s,tpot=40ms") == Slo.parse("tpot=0.04s, ttft=2000ms") == Slo(2.0, 0.04)


@pytest.mark.parametrize("text", ["", "ttft=2s", "ttft=2,tpot=40ms", "ttft=2s,ttft=3s", "ttft=0s,tpot=4ms", "x=2s"])
def test_another_slo_is_one_message(text: str) -> None:
    with pytest.raises(UsageError, match="not an SLO"):
        Slo.parse(text)


def test_layouts_have_the_pools_of_the_memory_plan() -> None:
    one, two, pair, _, many = LAYOUTS[:5]
    assert [layout.name for layout in (one, two, many)] == ["1 x TP 8", "2 x TP 4", "1 x TP 8, DP 8"]
    assert (one.kv_tokens, pair.groups, many.groups) == (1_702_894, 2, 8) and many.chunk == 2048
    assert (two.max_running, two.max_queued, two.context) == (32, 128, 131072)


def test_every_number_of_groups_is_ranked_with_and_without_the_delayer() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    groups = [(layout.groups, layout.delayed) for layout in LAYOUTS if layout.engines == 1]
    assert groups == [(1, False), (2, False), (4, False), (8, False), (2, True), (4, True), (8, True)]
    for layout in LAYOUTS:
        assert render(load_recipe(layout.recipe), layout.settings).refused == []


def test_a_clear_gain_names_the_command_that_serves_the_layout() -> None:
    found = plan({"1 x TP 8, DP 2": 200.0})
    assert found.winner is not None and found.verdict == "1 x TP 8, DP 2 serves this traffic best at 8 users"
    assert found.reasons()[-1].startswith("kimi-w4a8 serve agent --set draft.repo=")
    assert found.reasons()[-1].endswith("--set dp-size=2")


@pytest.mark.parametrize(("goodput", "good"), [(115.0, 0.97), (120.0, 0.97), (80.0 / 79.0 * 100, 0.97)])
def test_within_its_interval_a_gain_leaves_the_default(goodput: float, good: float) -> None:
    """Steps may be slower for one layout and faster for another: 1.1 / 0.9 is 1.22."""
    found = plan({"2 x TP 4": goodput}, good)
    assert "default, recipe agent, stays" in found.verdict and found.reasons() == []
    gain = found.gain("2 x TP 4")
    assert gain.low < 1 < gain.value < gain.high
    assert found.verdict.endswith(f": 2 x TP 4 serves {gain.value:.2f}x, at least {gain.low:.2f}x")


def test_a_default_that_may_meet_the_slo_stays_within_the_interval() -> None:
    found = plan({"2 x TP 4": 101.0}, {"1 x TP 8": 0.949})
    assert found.winner is not None and found.winner.recipe == "agent-2x4"  # the default never meets it
    found.chosen["1 x TP 8"][2] = figures("1 x TP 8", 110.0, 0.96)  # with faster steps it does
    assert found.winner.recipe == "agent"


def test_intervals_have_the_error_of_steps_the_spread_of_accept_lengths_and_of_arrivals() -> None:
    changes = variations(0.1, 2.7)
    assert changes[:3] == [{}, {"scale": 1.1}, {"scale": 0.9}] and changes[-2:] == [{"seed": 1}, {"seed": 2}]
    short, long = (change["accept_length"] for change in changes[3:5])
    assert 2.2 < short < 2.5 < 2.9 < long < 3.2
    assert [change["accept_length"] for change in variations(0.1, 1.0)[3:5]] == [1.0, 1.0]  # no drafts
    assert "100 (90 to 110)" in traffic_plan.rows(plan({}))[0]


def test_an_slo_that_no_layout_meets_names_the_nearest() -> None:
    found = plan({"2 x TP 4": 200.0}, good=0.5)
    assert found.winner is None and "The nearest is 2 x TP 4, with 50% of the requests" in found.verdict


@pytest.mark.slow
def test_the_verb_simulates_a_trace_to_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layouts and two numbers of users; all of them take minutes. The page has the figures of --json."""
    monkeypatch.setattr("kimi_w4a8_lab.commands.rank.node_layouts", lambda: LAYOUTS[:2])
    monkeypatch.setattr(trace_plan, "USERS", (2,))
    words = ["rank", str(mooncake(tmp_path / "t.jsonl", [1000, 2000])), "--slo", "ttft=2s,tpot=40ms", "--minutes", "1"]
    stored, _ = (CliRunner().invoke(app, [*words, *more]) for more in (["--json"], ["-o", str(tmp_path)]))
    found, text = json.loads(stored.stdout), (tmp_path / "report.html").read_text()
    assert f">By a model: {found['verdict']}</h1>" in text and MODEL in unescape(text) and 'class="lead"><img' in text
    assert text.index("By a model: ") < text.index(MODEL[:20]) < text.index(">2 x TP 4</td>")
    assert ">2</text>" in (picture := (tmp_path / "goodput.svg").read_text()) and "$" not in picture
    for name, figures_of in found["layouts"].items():
        assert re.search(rf">{name}</td><td [^>]*>{figures_of[0]['goodput_tok_s']:,.0f} \(", text)


def test_a_cold_prompt_takes_the_time_of_the_fitted_model() -> None:
    step, load = KimiStepTime(FIT, Cluster()), Load(40, steps=3, accept_length=2.7)
    alone = predict(replace(load, concurrency=1), "ttft_median_ms", FIT, Cluster())
    assert step.prefill([[(10240, 0)]]) * 1000 == pytest.approx(alone)
    context = 10240 + 256
    verify = step.decode([(40, 40 * context)]) * 1000 / 2.7
    assert verify == pytest.approx(predict(load, "itl_median_ms", FIT, Cluster()))


def test_cached_tokens_save_time_and_short_prompts_still_read_the_weights() -> None:
    step = KimiStepTime(FIT, Cluster())
    whole, rest, short = step.prefill([[(65536, 0)]]), step.prefill([[(512, 65024)]]), step.prefill([[(1, 0)]])
    assert rest < whole / 20 and 0.005 < short < step.prefill([[(2000, 0)]])


def test_dp_attention_splits_requests_and_their_kv() -> None:
    tp, dp = KimiStepTime(FIT, Cluster()), KimiStepTime(FIT, Cluster(groups=8))
    context = 64 * 65536
    assert dp.decode([(8, context / 8)] * 8) < tp.decode([(64, context)])  # heads are computed 16 at once
    assert dp.prefill([[(8192, 0)], *[[]] * 7]) > tp.prefill([[(8192, 0)]])  # a single prompt has one GPU's attention


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["t.jsonl", "--slo", "fast"], "not an SLO"),
        (["none.jsonl", "--slo", "ttft=2s,tpot=40ms"], "cannot read the trace"),
        (["{long}", "--slo", "ttft=2s,tpot=40ms"], "no request of the trace fits: each has more than 131,072 tokens"),
    ],
)
def test_wrong_words_give_one_message_and_write_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 5 million tokens is never simulated, and nothing is created."""
    (tmp_path / "empty").mkdir()
    long = mooncake(tmp_path / "long.jsonl", [200_000, 5_000_000])
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(KimiError) as caught:
        load("rank").main([*(word.format(long=long) for word in words), "-o", "page"], standalone_mode=False)
    assert said in str(caught.value)
    assert list((tmp_path / "empty").iterdir()) == []


def test_requests_beyond_the_context_and_assumed_answers_are_said(tmp_path: Path) -> None:
    found = plan({})
    found = replace(found, trace=read_trace(mooncake(tmp_path / "t.jsonl", [1000, 200_000])))
    assert "1 of 2 requests have more than 131,072 tokens with their answers." in traffic_plan.notes(found)
    turn = {"messages": [{"role": "user", "content": "\u2028"}], "prompt_tokens": 9}
    (tmp_path / "a.json").write_text(json.dumps({"conversations": [[turn]]}))
    found = replace(found, trace=read_trace(tmp_path / "a.json"))
    assert "The trace has no lengths of answers: 220 tokens each are assumed." in traffic_plan.notes(found)


def test_sigterm_ends_a_simulation_and_leaves_no_folder(tmp_path: Path) -> None:
    """The simulation's process is still in its imports, and ends with the command."""
    trace = mooncake(tmp_path / "t.jsonl", [1000])
    (tmp_path / "temporary").mkdir()
    words = [sys.executable, "-m", "kimi_w4a8_eagle3", "rank", str(trace), "--slo", "ttft=2s,tpot=40ms"]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (found := list((tmp_path / "temporary").glob("kimi-rank-*/log"))) and process.poll() is None:
            time.sleep(0.05)
        assert found
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "temporary").iterdir()) == []


def mooncake(path: Path, lengths: list[int]) -> Path:
    rows = [{"timestamp": 0, "input_length": length, "output_length": 16} for length in lengths]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path

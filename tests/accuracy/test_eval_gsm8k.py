"""`eval gsm8k` with the real lm-eval against a real HTTP server that fails on purpose, dies and comes back."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console
from support.openai_server import OpenAIServer, Reply

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy import accuracy, tasks
from kimi_w4a8_lab.accuracy.accuracy import load_outcomes
from kimi_w4a8_lab.accuracy.evaluation import RunOptions
from kimi_w4a8_lab.accuracy.recorder import Patience
from kimi_w4a8_lab.accuracy.tasks import Protocol
from kimi_w4a8_lab.base.run_folder import RESULT, RunFolder
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.commands.eval import Served, _planned

LIMIT = 24
KEY = "a-key-for-this-test"
PROTOCOL = Protocol(tasks.GSM8K, chat=False, shots=10, max_tokens=64, limit=LIMIT, concurrency=4)
QUICK = Patience(attempts=3, first_pause_s=0.02, longest_pause_s=0.1, server_away_s=0.5)
SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Our own problems in the number and format of GSM8K."""
    folder = tmp_path_factory.mktemp("data")
    for split, (start, count) in {"train": (0, 7473), "test": (10_000, 1319)}.items():
        lines = (
            json.dumps({"question": f"What is {n} plus 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"})
            for n in range(start, start + count)
        )
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def answer(prompt: str, n: int) -> Reply:
    """Problem 3 is wrong, 5 lacks the marker, 7 is cut, 9 is refused for good, 11 twice and then answered."""
    number = int(prompt.rpartition("What is ")[2].split()[0])
    right = f" It is {number + 1}.\n#### {number + 1}"
    return {
        10_003: Reply(" #### 5"),
        10_005: Reply(f" It is {number + 1}."),
        10_007: Reply(" It is, let me think", finish_reason="length"),
        10_009: Reply(status=400),
        10_011: Reply(status=429, headers={"Retry-After": "0"}) if n < 3 else Reply(right),
    }.get(number, Reply(right))


@dataclass
class Resumed:
    """A run whose server died after some answers and that was finished with --resume against a second server."""

    folder: Path
    interrupted: KimiError
    answered_before: set[str]
    asked_after: set[str]
    output: str
    exit_code: int


@pytest.fixture(scope="module")
def resumed(data, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    answered: set[str] = set()
    server: list[OpenAIServer] = []

    def mortal(prompt: str, n: int) -> Reply:
        if len(answered) >= 8:
            return Reply(drop=True)
        reply = answer(prompt, n)
        if reply.status == 200:
            answered.add(prompt)
        if len(answered) == 8:
            server[0].socket.close()  # refuses new connections while this request is answered
        return reply

    server.append(OpenAIServer(mortal, api_key=KEY))
    options = RunOptions(data_dir=data, runs=runs, patience=QUICK)
    with pytest.raises(KimiError) as caught:
        accuracy.run(Target(base_url=server[0].base_url, api_key=KEY), PROTOCOL, options, SILENT)
    server[0].close()
    (folder,) = runs.iterdir()
    assert not (folder / RESULT).exists()
    with OpenAIServer(answer, port=server[0].server_port, api_key=KEY) as again:
        words = [sys.executable, "-m", "kimi_w4a8_eagle3.cli", "eval", "gsm8k", "--resume", str(folder)]
        done = subprocess.run(
            words, env={**os.environ, "KIMI_API_KEY": KEY}, capture_output=True, text=True, timeout=200
        )
    return Resumed(
        folder, caught.value, answered, set(again.asked), " ".join((done.stdout + done.stderr).split()), done.returncode
    )


def test_a_server_that_dies_ends_the_run_with_the_way_to_go_on(resumed):
    assert "no server has listened" in resumed.interrupted.what
    assert f"--resume {resumed.folder}" in resumed.interrupted.remedy


def test_the_key_of_the_server_is_written_nowhere(resumed):
    files = [path for path in resumed.folder.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if KEY in path.read_text(errors="replace")]
    assert KEY not in resumed.output


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({}, "needs a key"),
        ({"api_key": "another-key"}, "needs a key"),
        ({"api_key": KEY, "model": "kimi"}, "serves 'other', not 'kimi'"),
        ({"base_url": "http://127.0.0.1:9"}, "does not answer"),
        ({"base_url": None, "recipe": "eagle3-opt"}, "this machine cannot serve the recipe 'eagle3-opt'"),
    ],
)
def test_a_server_that_cannot_be_measured_is_named_before_anything_is_asked(data, tmp_path, target, said):
    with OpenAIServer(answer, model="other", api_key=KEY) as server:
        with pytest.raises(KimiError, match=said):
            options = RunOptions(data_dir=data, runs=tmp_path)
            accuracy.run(Target(**{"base_url": server.base_url, **target}), PROTOCOL, options, SILENT)
        assert server.asked == {}
    assert not list(tmp_path.iterdir())  # no half-made run directory


def test_a_resumed_run_asks_nothing_twice(resumed):
    assert len(resumed.answered_before) >= 8
    assert not resumed.answered_before & resumed.asked_after
    assert len(resumed.answered_before | resumed.asked_after) == LIMIT
    requests = json.loads((resumed.folder / RESULT).read_text())["requests"]
    assert requests["reused"] == len(resumed.answered_before) and "| reused | retries |" in resumed.output


def test_each_problem_is_recorded_with_its_status_and_score(resumed):
    outcomes = {o.id: o for o in load_outcomes(resumed.folder)}
    assert len(outcomes) == LIMIT
    flexible, strict = tasks.METRICS
    assert outcomes[0].correct == {flexible: True, strict: True} and outcomes[0].target == "10001"
    assert outcomes[3].correct == {flexible: False, strict: False} and outcomes[3].extracted[strict] == "5"
    assert outcomes[5].correct == {flexible: True, strict: False}
    assert outcomes[5].status == "answered" and not outcomes[5].has_marker
    assert outcomes[7].status == "truncated"
    assert outcomes[9].status == "failed" and "HTTP 400" in outcomes[9].error
    assert all(outcomes[n].correct == {flexible: True, strict: True} for n in range(12, LIMIT))
    assert outcomes[11].status == "answered" and all(outcomes[11].correct.values())


def test_the_verdict_counts_failed_and_cut_answers(resumed):
    result = json.loads((resumed.folder / RESULT).read_text())
    verdict = result["verdict"]
    shown = resumed.output.replace("| ", "")
    assert resumed.exit_code == 4 and "INVALID: GSM8K" in shown
    assert "1 requests failed, 1 answers were cut" in shown
    assert verdict["state"] == "invalid" and (verdict["failed"], verdict["truncated"]) == (1, 1)
    assert all(row["answered"] == LIMIT - 1 for row in verdict["accuracies"])
    page = (resumed.folder / "report.html").read_text()
    assert all(f">{row['correct']} of {LIMIT - 1}<" in page for row in verdict["accuracies"])
    theirs = result["lm_eval"]
    for row in verdict["accuracies"]:  # lm-eval scores the failed one as wrong; the number of right ones is the same
        assert row["correct"] == round(theirs[f"exact_match,{row['metric']}"] * LIMIT)


def test_chat_answers_are_cut_at_a_stop_after_the_thinking_and_without_text_they_are_invalid(data, tmp_path):
    def think(prompt: str, n: int) -> Reply:
        number = int(prompt.rpartition("What is ")[2].split()[0])
        right, quoting = f"It is {number + 1}.\n#### {number + 1}", "Question: what is it? I add 1."
        return {
            10_000: Reply(right, thinking=quoting),
            10_001: Reply(f"<think>{quoting}</think>{right}"),  # a server without a reasoning parser
            10_002: Reply(f"{right}\n\nQuestion: What is 0 plus 0?\n#### 0"),
        }.get(number, Reply(finish_reason="length" if number == 10_003 else "stop", thinking=quoting))

    def outcomes(limit: int):
        protocol = replace(PROTOCOL, chat=True, shots=1, limit=limit)
        options = RunOptions(data_dir=data, runs=tmp_path / str(limit), patience=QUICK)
        folder = accuracy.run(Target(base_url=server.base_url), protocol, options, SILENT)
        return load_outcomes(folder), json.loads((folder / RESULT).read_text())["verdict"]

    with OpenAIServer(think) as server:
        good, verdict = outcomes(3)
        assert [all(one.correct.values()) for one in good] == [True] * 3 and verdict["state"] == "measured"
        found, verdict = outcomes(6)
    assert [one.status for one in found[3:]] == ["truncated", "answered", "answered"]
    assert found[3].why_empty == "only thinking came; raise --max-tokens"
    assert (
        verdict["state"] == "invalid"
        and "1 answers were cut at the token limit and 2 are empty" in verdict["reasons"][0]
    )
    assert "only thinking came; read requests.jsonl" in verdict["reasons"][0]


def test_a_resumed_run_goes_on_with_its_own_model_only(resumed):
    earlier = RunFolder.resume(resumed.folder).record
    other = Served("http://127.0.0.1:1", None, None, [], None)
    assert _planned(other, resumed.folder, PROTOCOL)[0].model == "test-model"
    target, plan = _planned(replace(other, base_url=None), resumed.folder, replace(PROTOCOL, shots=3))
    assert target.base_url == earlier["targets"]["server"]["base_url"] and plan == PROTOCOL


def test_a_baseline_of_another_protocol_is_refused(resumed, data, tmp_path):
    options = RunOptions(data_dir=data, runs=tmp_path, baseline=resumed.folder)
    five_shot = Protocol(tasks.GSM8K, chat=False, shots=5, max_tokens=64, limit=LIMIT)
    with OpenAIServer(answer) as server:
        with pytest.raises(KimiError, match="the baseline has shots 10, this run has 5"):
            accuracy.run(Target(base_url=server.base_url), five_shot, options, SILENT)
        options = RunOptions(data_dir=data, runs=tmp_path, baseline=tmp_path)
        with pytest.raises(KimiError, match="no run is here"):
            accuracy.run(Target(base_url=server.base_url), PROTOCOL, options, SILENT)
    assert not list(tmp_path.iterdir())

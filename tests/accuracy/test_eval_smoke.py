"""Smoke checks on answers, and the HTML of a run."""

import json
import re
import sys

import pytest
from support.every_page import accuracy_result
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import checked
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accept.journal import AcceptResult, StageResult
from kimi_w4a8_lab.accuracy import smoke
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.recorder import Answer
from kimi_w4a8_lab.accuracy.results import (
    Accuracy,
    Conclusion,
    Judgement,
    Reference,
    SmokeResult,
)
from kimi_w4a8_lab.accuracy.significance import ShareInterval
from kimi_w4a8_lab.base.run_folder import RESULT, RunFolder
from kimi_w4a8_lab.base.verdict import Verdict
from kimi_w4a8_lab.report import evaluation
from kimi_w4a8_lab.report.page import Page, Section, Words, joined, write_page

PROBLEMS = problems(10, seed=21)


def answered(text, accepted=(0, 0, 1, 4), reason="stop", error=None):
    details = {"spec_tokens_details": {"spec_correct_drafts_histogram": list(accepted)}} if accepted else None
    return Answer("key", text, reason, 1, 1, 0.1, error, {"sglext": details})


GOOD = [answered(p.solution) for p in PROBLEMS]


def failed(answers, **floors):
    return [c.name for c in smoke.check(PROBLEMS, answers, smoke.Floors(**floors)) if not c.passed]


def replaced(*answers):
    return [*answers, *GOOD[len(answers) :]]


def test_good_answers_pass():
    assert failed(GOOD) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "empty, garbled or looping answers"),
        ("now now now now now now now now now now now", "empty, garbled or looping answers"),
        ("\ufffd\ufffd 12", "empty, garbled or looping answers"),
    ],
)
def test_one_odd_answer_fails(text, name):
    assert failed(replaced(answered(text))) == [name]


def test_failures_cut_answers_wrong_answers_and_rejected_drafts():
    assert failed(replaced(answered("", error="HTTP 500"))) == ["requests answered"]
    cut = [answered(p.solution, reason="length") for p in PROBLEMS]
    assert failed(cut[:1] + GOOD[1:]) == [] and failed(cut) == ["answers cut at the limit"]
    wrong = [answered("#### -1") for _ in PROBLEMS]
    assert failed(wrong) == ["problems solved"] and failed(wrong[:4] + GOOD[4:]) == []
    texts = ("so 3 + 4 = 7\n#### 7", "It is **1,234**.", "none")
    assert [smoke.stated_number(text) for text in texts] == [7, 1234, None]
    rejected = [answered(p.solution, (9, 1, 0, 0)) for p in PROBLEMS]
    assert failed(rejected) == ["accept length"] and failed(rejected, accept_length=1.05) == []
    plain = [answered(p.solution, ()) for p in PROBLEMS]
    assert failed(plain) == ["accept length"] and failed(plain, speculates=False) == []
    assert failed(GOOD, speculates=False) == ["speculation"]


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        ("--recipe agent", True),
        ("--recipe agent:plain", False),
        ("--recipe w4a8", False),
        ("--base-url http://127.0.0.1:9 --no-speculation", False),
    ],
)
def test_a_recipe_without_a_draft_is_asked_for_no_accepted_drafts(words, drafts, monkeypatch):
    monkeypatch.setattr(smoke, "run", lambda target, floors, *_: sys.exit(f"{floors.speculates} {floors.correct}"))
    result = CliRunner().invoke(app, ["eval", "smoke", *words.split(), "--min-correct", "0.5"])
    assert str(result.exception) == f"{drafts} 0.5"


def test_the_page_escapes_answers_and_loads_no_outside_file(tmp_path):
    nasty, apart = "<script>alert(1)</script>", ShareInterval(-0.03, -0.05, 0.01)
    reference = Reference("w4a8", "strict-match", 0.9333, 1319, "S", apart)
    verdict = Judgement(
        Verdict.FAIL, ["worse"], references=[reference],
        accuracies=[Accuracy("strict-match", 9, 10, ShareInterval(0.9, 0.85, 0.95))],
        differing=[["3", nasty, "4", "strict-match: new", nasty, ""]],
    )  # fmt: skip
    result = accuracy_result(verdict, "eagle3", task="GSM8K", judged_against="w4a8")
    record = {"started": "2026-11-22T12:00:00", "versions": {"sglang": "0.5.23"}, "git_commit": "0123456789abcdef"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    page = write_page(evaluation.page(tmp_path, result), tmp_path).read_text()
    assert "<title>FAIL: GSM8K, eagle3</title>" in page and 'name="viewport"' in page
    assert " of kimi. PASS means: " in page and "2026-11-22T12:00:00, sglang 0.5.23, commit 0123456789ab</p>" in page
    assert "<script" not in page and "&lt;script&gt;" in page and "http" not in page
    assert "90.00% [85.00%, 95.00%]" in page and "-3.00 [-5.00, +1.00] points" in page
    assert "interval of the difference to what was reported lies above -3 points" in page


def store(folder, result):
    run = RunFolder(folder, {})
    run.note()
    run.save(result)


def smoke_result(passed=True):
    checks = [checked("requests answered", "3 of 4", "all", passed)]
    verdict = Conclusion(Verdict.PASS if passed else Verdict.FAIL, [])
    return SmokeResult(
        configuration="eagle3", model="m", verdict=verdict, requests={}, checks=checks, solved=3, wanted=0.6,
        problems=[{}] * 4,
    )  # fmt: skip


def test_kimi_report_shows_evaluations_alone_and_at_the_end_of_a_benchmark_page(tmp_path):
    store(tmp_path, smoke_result(passed=False))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "3 of 4" in (tmp_path / "out" / "report.html").read_text()
    speed = Page("speed", [Words("fast")], sections=[Section("speed", listings=[("a", "b")])])
    both = joined([speed, evaluation.page(tmp_path, smoke_result())])
    text = write_page(both, tmp_path / "both").read_text()
    assert text.index("<h1>speed") < text.index("fast") < text.index("<h2>speed") < text.index("<h2>Checks")


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (None, "no run is here: No such file or directory"),
        ("{", "result.json cannot be read: Invalid JSON"),
        ("[]", "result.json cannot be read: Input should be a valid dictionary"),
        ('{"kind": "<b>another"}', "Input tag &#39;&lt;b&gt;another&#39; found"),
        (
            '{"kind": "bench", "status": "complete", "sides": [], "measurements": [{}]}',
            "bench.measurements.0.side: Field req",
        ),
        ('{"kind": "eval-smoke", "configuration": "<b>tiny"}', "eval-smoke.model: Field required"),
    ],
)
def test_an_unreadable_folder_gets_a_page_that_names_the_missing_part(tmp_path, content, missing):
    run = tmp_path / "<b>run"
    run.mkdir()
    if content is not None:
        (run / "result.json").write_text(content)
    done = CliRunner().invoke(app, ["report", str(run), "--output", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.html").read_text()
    assert done.exit_code == 1 and "NOT SHOWN: &lt;b&gt;run" in text and missing in text and "<b>" not in text
    assert not re.search(r": *</div>", text)  # a part of the message that is empty


def test_report_leaves_nothing_where_there_is_no_run(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path / "TYPO")])
    assert isinstance(done.exception, KimiError) and "no run is here" in done.exception.what
    assert list(tmp_path.iterdir()) == []


def test_kimi_report_shows_an_acceptance_run(tmp_path):
    stages = {name: StageResult("ready") for name in ("doctor", "smoke")}
    store(tmp_path, AcceptResult({"sglang": "1.2"}, stages))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert '<h1 class="better">ACCEPTED: 2 of 2 stages passed' in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / RESULT).write_text((tmp_path / RESULT).read_text()[:-9])
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.html").read_text()
    assert done.exit_code == 1 and "result.json cannot be read" in text and "ACCEPTED" not in text

"""Smoke checks on answers, and the HTML of a run."""

import re
import sys

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accuracy import smoke
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.accuracy.recorder import Answer

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

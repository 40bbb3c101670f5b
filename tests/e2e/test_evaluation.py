"""`eval` against real servers: lossless passes, finds a broken verify step and ignored temperature; accuracy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.every_page import Shown
from support.tiny_servers import flush_cache, tiny_launch, with_faults
from support.waiting import until
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.process import EngineServer
from kimi_w4a8_lab.accuracy import comparison, lossless, smoke
from kimi_w4a8_lab.accuracy.prompts import prompts
from kimi_w4a8_lab.accuracy.results import LosslessReport
from kimi_w4a8_lab.accuracy.tokens import TokenClient, Tokens
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_laptop import exact

pytestmark = pytest.mark.server
SILENT = Console(quiet=True)
CHANGING = (  # of support.wrong_answers
    "bonus token from the draft", "KV of a rejected token kept", "position off by one after a partial acceptance",
    "wrong page in a radix node", "stop string cut late", "one draw for all requests", "noise of the position before",
    "penalties of the step before", "draft accepted without equality",
)  # fmt: skip
DRAWN_ANEW = 1e-6  # a p that right samples never reach; the command's own level is one false alarm in a thousand
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
SEEDED = {"temperature": 1.5, "max_new_tokens": 24}
PENALIZED = {"temperature": 0.0, "max_new_tokens": 24, "frequency_penalty": 1.0, "min_new_tokens": 20}
FLOORS = smoke.Floors(problems=12, accept_length=2.7)  # the built-in draft reaches 3.4, on the wrong hidden states 2.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, Path]]:
    """EAGLE3 with a prefix cache, and the file that names the fault which its program has at the moment."""
    folder = tmp_path_factory.mktemp("faulty")
    (named := folder / "fault").touch()
    launch = tiny_launch(settings=("disable-radix-cache=false", f"env.KIMI_PLANTED={named}"))
    for server in with_faults(launch, "support.wrong_answers", folder):
        yield server, named


def compared(reference: EngineServer, target: EngineServer, runs: Path, **plan: object) -> LosslessReport:
    choices = [Target(base_url=one.address.url, api_key=one.address.key) for one in (reference, target)]
    with pytest.MonkeyPatch.context() as patch:  # a CPU prefills 40 problems for a second, a dozen times
        patch.setattr("kimi_w4a8_lab.accuracy.prompts._LONG_QUESTIONS", 10)
        return lossless.run(*choices, lossless.LosslessPlan(runs=runs, **plan), SILENT)[1]


@pytest.fixture(scope="module")
def healthy(plain: EngineServer, eagle3: FrontedEngine, tmp_path_factory: pytest.TempPathFactory) -> LosslessReport:
    """Greedy answers and samples in one run."""
    runs = tmp_path_factory.mktemp("healthy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "ALPHA", DRAWN_ANEW)
        return compared(plain, eagle3, runs, prompts=6, max_tokens=24, samples=30, prefixes=2)


def test_an_engine_compares_its_experts_with_the_files(eagle3):
    assert "weights are compared with" in eagle3.log_path.read_text()


@pytest.mark.slow
def test_eagle3_changes_no_greedy_token(healthy):
    assert healthy.state == "pass", healthy.reasons
    assert healthy.accept_length > 1.5
    assert healthy.differences == [] and {(m.differing, m.own) for m in healthy.matches} == {(0, 0)}
    assert [(m.further, m.nearer, m.beyond) for m in healthy.prefill.measures] == [(0, 0, 0)] * 2  # no rounding here


@pytest.mark.slow
def test_a_verify_step_that_accepts_everything_is_found(plain, faulty, tmp_path):
    server, named = faulty
    named.write_text("every draft accepted")
    report = compared(plain, server, tmp_path, prompts=3, max_tokens=24, samples=0)
    assert report.state == "fail"
    assert report.accept_length > 3.5  # it looks splendid
    assert {difference.concurrency for difference in report.differences} == {1, 8, 40}
    assert report.prefill.not_best > 9 and "not the argmax of the logits" in report.reasons[0]


@pytest.fixture(scope="module")
def expected(plain: EngineServer) -> tuple[list[exact.ExactRequest], list[Tokens]]:
    """Requests, one of them with a stop string that ends it, and their answers, one after the other."""
    with TokenClient(*plain.address) as probe:
        kinds = [prompt for prompt in prompts(6) if prompt.kind != "long"]  # a second of prefill each time
        ids = [probe.chat_ids(prompt.text, "kimi-k2.5-tiny") for prompt in kinds]
        whole = probe.greedy(ids[1], 48, with_top=True)
        asked = [exact.ExactRequest("chat", prompt, GREEDY) for prompt in ids]
        asked.append(exact.ExactRequest("stop", ids[1], GREEDY | {"stop": whole.text[len(whole.text) // 2 :][:3]}))
        asked += [exact.ExactRequest("seeded", ids[0], SEEDED | {"sampling_seed": seed}) for seed in range(4)]
        asked += [exact.ExactRequest("penalized", prompt, PENALIZED) for prompt in ids]
        return asked, [exact.ask(probe, request) for request in asked]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *CHANGING])
def test_a_fault_that_changes_an_answer_is_found_and_nothing_else_is(faulty, expected, fault):
    """Asked twice: what was answered first is in the prefix cache then."""
    (server, named), (asked, answers) = faulty, expected
    until(lambda: flush_cache(server))  # refused until the last request has left
    named.write_text(fault)
    with TokenClient(*server.address) as probe:
        found = [probe.all(lambda request: exact.ask(probe, request), asked, len(asked)) for _ in range(2)]
    assert sum(answer.cached for answer in found[1]) > 0 and sum(answer.verify_steps for answer in found[1]) > 0
    assert any(exact.differences(asked, answers, answer, "EAGLE3", 7) for answer in found) == bool(fault)


@pytest.mark.parametrize(
    ("how", "headline"),
    [
        ("--exact", "PASS: Lossless speculation, bit for bit, "),
        pytest.param("--samples 0", "PASS: Lossless speculation, ", marks=pytest.mark.slow),
    ],
)
def test_a_comparison_from_the_command_line_to_its_page(plain, eagle3, tmp_path, monkeypatch, how, headline):
    monkeypatch.setattr(exact, "_VERY_LONG_QUESTIONS", 12)  # 180 take a CPU 10 s to prefill, each time
    monkeypatch.setattr(exact, "_VERY_LONG", 200)
    monkeypatch.setattr("kimi_w4a8_lab.accuracy.prompts._LONG_QUESTIONS", 10)
    words = f"lossless {how} --reference-url {plain.engine_file} --num-prompts 6 --max-tokens 6"
    assert evaluated(words, eagle3, tmp_path).headline.startswith(headline)


@pytest.mark.slow
def test_the_wrong_hidden_state_changes_no_answer_but_smoke_sees_the_accept_length(faulty, expected, tmp_path):
    (server, named), (asked, answers) = faulty, expected
    named.write_text("hidden state of the wrong token")
    with TokenClient(*server.address) as probe:
        found = probe.all(lambda request: exact.ask(probe, request), asked, len(asked))
    assert not exact.differences(asked, answers, found, "EAGLE3", len(asked))
    _, state, checks = smoke.run(
        Target(base_url=server.address.url, api_key=server.address.key), FLOORS, SILENT, tmp_path
    )
    assert state == "fail" and [c.name for c in checks if not c.passed] == ["accept length"], checks


@pytest.mark.slow
def test_sampled_verification_has_the_distribution_of_plain_decoding(healthy):
    assert healthy.sampling.tests and not healthy.sampling.ignores_temperature
    assert healthy.sampling.smallest > DRAWN_ANEW


@pytest.mark.slow
def test_a_server_has_its_own_distribution_and_does_not_count_as_speculating(plain, tmp_path):
    report = compared(plain, plain, tmp_path, prompts=6, max_tokens=8, samples=60, prefixes=2)
    assert report.sampling.tests
    assert report.sampling.smallest > DRAWN_ANEW
    assert report.state == "invalid" and "does not speculate" in report.reasons[0]


def evaluated(words: str, server: EngineServer, runs: Path) -> Shown:
    """Run a verb to its page, whose tables have the figures of the stored result."""
    at = server.engine_file if words.startswith("lossless") else server.base_url
    done = CliRunner().invoke(app, ["eval", *words.split(), "--base-url", str(at), "--runs", str(runs)])
    shown = Shown(done.output, runs)
    for one in shown.stored["verdict"].get("accuracies", ()):
        assert shown.rows[one["metric"],][1] == f"{one['correct']} of {one['answered']}"
    for one in shown.stored.get("checks", ()):
        assert shown.rows[one["name"],][1] == one["found"]
    return shown


def test_tiny_math_reaches_the_recorded_accuracy(eagle3, tmp_path):
    shown = evaluated("tiny-math --limit 50 --max-unusable 0.02", eagle3, tmp_path)
    outcomes = shown.stored["outcomes"]
    assert len(outcomes) == 50 and sum(one["correct"]["strict-match"] for one in outcomes) >= 46
    assert ": tiny-math" in shown.headline and "against recorded&#39;s 98.60%, margin 3 points" in shown.text


def test_smoke_passes_with_eagle3(eagle3, tmp_path):
    shown = evaluated("smoke --limit 12 --min-accept-length 2.7", eagle3, tmp_path)
    assert shown.headline.startswith("PASS: Smoke test, ") and "PASS means: every check holds." in shown.text
    assert len(shown.stored["checks"]) == 5


@pytest.mark.slow
def test_calls_are_measured_to_a_page(eagle3, tmp_path):
    shown = evaluated("tools --limit 4 --max-tokens 64", eagle3, tmp_path)
    assert ": Tool calls, " in shown.headline and "is not judged: add --published" in shown.text
    assert len(shown.stored["checks"]) == 7 and len(shown.stored["verdict"]["accuracies"]) == 2

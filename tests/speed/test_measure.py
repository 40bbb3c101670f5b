"""One measurement by the real generator: every figure that is known in advance comes out exactly."""

import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.null_server import KEY, NUM_PROMPTS, null_server, steps_of

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.engine import process
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve
from kimi_w4a8_lab.base.counters import Counters
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.report.analysis import Analysis
from kimi_w4a8_lab.report.measured import page, turn_tables
from kimi_w4a8_lab.report.tables import print_page
from kimi_w4a8_lab.speed import generator
from kimi_w4a8_lab.speed import measure as measuring
from kimi_w4a8_lab.speed.bench import Plan, Texts, bench
from kimi_w4a8_lab.speed.generator import LoadDetails, LoadResult, read_last
from kimi_w4a8_lab.speed.measure import _judge
from kimi_w4a8_lab.speed.runs import Run, read_run
from kimi_w4a8_lab.speed.workloads import load_workload, with_changes

TOKENS = 48
STEPS = steps_of(TOKENS)


def test_tokens_and_requests_are_counted(null_run: Run) -> None:
    found = null_run.result.measurements[0].load
    assert found.completed == NUM_PROMPTS
    assert found.total_output_tokens == NUM_PROMPTS * TOKENS
    assert found.total_input_tokens == NUM_PROMPTS * 192


def test_accept_length_counts_the_measured_requests_and_not_the_warm_up(null_run: Run) -> None:
    accepted = null_run.result.measurements[0].acceptance
    assert accepted is not None
    assert accepted.steps == NUM_PROMPTS * len(STEPS)
    assert accepted.length == pytest.approx((TOKENS - 1) / len(STEPS))


def test_the_page_says_how_busy_the_machine_was_and_warns_once(
    null_run: Run, copies: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "watched", lambda: lambda: 0.4)
    point = replace(with_changes(load_workload("tiny-con2"), num_prompts=2).points()[0], warmups=0)
    texts = null_run.folder / "texts.json"
    with null_server() as url:
        before = Target(url).connected
        started = replace(before, launch=resolve(load_recipe("tiny")))
        found = [measuring.measure(server, point, texts, tmp_path, 0) for server in (before, started)]
    assert [one.others for one in found] == [None, 0.4]
    shown = page(Analysis([copies("busy", "w4a8", count=2, others=0.4)]), charts=False)
    assert shown.about.startswith(f"Benchmark of {found[0].model}. On ")  # the model that was served
    assert "cores (other programs used up to 40%)" in shown.about
    assert [note[:23] for note in shown.notes if "programs" in note] == ["Other programs used 40%"]


def test_the_server_is_asked_before_a_large_text_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Texts, "prepare", lambda self, workload: pytest.fail("the text was fetched first"))
    said: list[str] = []
    with pytest.raises(KimiError, match="does not answer"):
        bench(Plan([Target("http://127.0.0.1:9")], [load_workload("con2")]), Texts(), tmp_path, said.append)
    assert said == ["http://127.0.0.1:9: asking the server"] and not list(tmp_path.iterdir())


def test_positions_come_from_the_probes(null_run: Run) -> None:
    found = null_run.result.measurements[0]
    assert found.acceptance is not None and found.probes
    assert found.acceptance.per_position == pytest.approx([sum(s > k for s in STEPS) / len(STEPS) for k in (1, 2, 3)])


def test_the_prompts_are_repeated_text(null_run: Run) -> None:
    found = null_run.result.measurements[0]
    sent = (null_run.folder / found.raw).with_suffix(".prompts").read_text().splitlines()
    prompts = [json.loads(line) for line in sent][found.workload.warmups :]
    assert len(prompts) == NUM_PROMPTS
    assert {row["prompt_len"] for row in prompts} == {192}
    assert found.text is not None and found.text.prompt > 0.5
    assert found.text.warning is not None and "repeats itself" in found.text.warning


def test_everything_needed_to_repeat_the_run_is_recorded(null_run: Run) -> None:
    found, record = null_run.result.measurements[0], null_run.record
    assert null_run.result.status == "complete"
    assert "kimi_w4a8_lab.with_sglang.bench_generator" in found.command and "--seed" in found.command
    assert {"versions", "git_commit", "machine", "hardware", "command", "gates", "started"} <= set(record)
    assert read_last(null_run.folder / found.raw, LoadResult) == found.load
    assert len(read_last(null_run.folder / found.raw, LoadDetails).itls) == NUM_PROMPTS


def test_failed_requests_mark_the_measurement(failed_run: tuple[Run, KimiError]) -> None:
    run, error = failed_run
    assert "2 of 6 requests failed" in str(error)
    assert str(run.folder) in str(error)
    assert run.usable == [] and "2 of 6 requests failed" in run.refused[0][1]


def test_a_wrong_length_or_another_client_is_a_problem_and_hits_in_the_prefix_cache_are_noted(null_run: Run) -> None:
    point = with_changes(load_workload("tiny-con2"), num_prompts=NUM_PROMPTS).points()[0]
    found = null_run.result.measurements[0]
    details = read_last(null_run.folder / found.raw, LoadDetails)
    tokens = found.load.total_input_tokens
    counted = Counters(0, tokens, 0, NUM_PROMPTS)
    assert _judge(point, found.load, details, counted) == ([], [])
    short = details.model_copy(update={"output_lens": [TOKENS - 1, *details.output_lens[1:]]})
    assert _judge(point, found.load, short, counted)[1] == ["1 outputs are not 48 tokens long, as requested"]
    shared = Counters(0, tokens, 0, NUM_PROMPTS + 1)
    assert "another client" in _judge(point, found.load, details, shared)[1][0]
    [note], problems = _judge(point, found.load, details, Counters(0, tokens, 0, NUM_PROMPTS, 0.25 * tokens))
    assert "25.0% of the prompt tokens came from the prefix cache" in note and not problems
    full = replace(counted, retracted=2.0)
    assert _judge(point, found.load, details, full)[0][0].startswith("the KV pool was full: 2 requests were retracted")


def test_conversations_are_measured_turn_by_turn(null_run: Run, tmp_path: Path) -> None:
    """The null server counts words and has every earlier message in its cache. null_run: there is a fork server."""
    workload = with_changes(load_workload("tiny-agent"), num_prompts=2, output_len=8)
    with null_server() as url:
        run = read_run(bench(Plan([Target(url)], [workload]), Texts(), tmp_path, lambda _: None))
    [found] = run.result.measurements
    sent = json.loads((run.folder / "texts.json").read_text())["conversations"]
    said = [[sum(len(m["content"].split()) for m in turn["messages"]) for turn in turns] for turns in sent[:2]]
    assert found.load.completed == 8 and found.usable and len(found.turns) == 4
    known = [sum(turns[:at]) + 8 * at for at in range(4) for turns in said]  # the server says "x " eight times
    assert [turn.cached_tokens * 2 for turn in found.turns] == [sum(known[at : at + 2]) for at in (0, 2, 4, 6)]
    computed = [turn.prompt_tokens - turn.cached_tokens for turn in found.turns]
    assert computed == [sum(turns[at] for turns in said) / 2 for at in range(4)]
    prompts = sum(turn.prompt_tokens for turn in found.turns)
    assert found.cached == pytest.approx(sum(turn.cached_tokens for turn in found.turns) / prompts)
    screen = Console(file=io.StringIO(), width=120)
    print_page(page(Analysis([run]), charts=False), screen)
    assert f"{found.cached:.0%} of the prompt tokens cached" in screen.file.getvalue()
    [turns] = turn_tables(Analysis([run]))
    assert f"{found.turns[3].cached_tokens / found.turns[3].prompt_tokens:.1%}" in turns.rows[3]


def test_a_cut_line_is_one_message(null_run: Run, tmp_path: Path) -> None:
    whole = (null_run.folder / null_run.result.measurements[0].raw).read_text()
    path = tmp_path / "cut.jsonl"
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(KimiError, match="cannot read"):
        read_last(path, LoadResult)
    path.write_text("")
    with pytest.raises(KimiError, match="empty result"):
        read_last(path, LoadResult)


def test_a_killed_generator_leaves_an_incomplete_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process has the variables that a forked one has."""
    given = f"os.environ['OPENAI_API_KEY'] == {KEY!r} and os.environ['HF_HUB_OFFLINE'] == '1'"
    suicide = [sys.executable, "-c", f"import os; {given} and os.kill(os.getpid(), {int(signal.SIGKILL)})"]
    monkeypatch.setattr(generator, "generator_program", lambda *_: SimpleNamespace(argv=suicide))
    monkeypatch.setattr(process, "laptop_part", lambda _: None)
    with null_server(api_key=KEY) as url, pytest.raises(KimiError, match="signal 9") as caught:
        bench(Plan([Target(url, api_key=KEY)], [load_workload("tiny-con2")]), Texts(), tmp_path, lambda _: None)
    run = read_run(next(tmp_path.iterdir()))
    assert run.result.status == "incomplete" and "signal 9" in run.result.reason
    assert "what is finished is kept; repeat the command with --resume" in str(caught.value)


@pytest.mark.parametrize("key", [None, KEY + "x"], ids=["none", "wrong"])
def test_a_server_that_asks_for_another_key_leaves_no_folder(tmp_path: Path, key: str | None) -> None:
    with null_server(api_key=KEY) as url, pytest.raises(KimiError, match="needs a key"):
        bench(Plan([Target(url, api_key=key)], [load_workload("tiny-con2")]), Texts(), tmp_path, lambda _: None)
    assert not list(tmp_path.iterdir())


def test_the_key_of_the_server_is_written_nowhere(null_run: Run) -> None:
    files = [path for path in null_run.folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if KEY in path.read_text(errors="replace")]


def test_the_wrong_model_and_a_short_context_are_refused(tmp_path: Path) -> None:
    with null_server(context_len=1024) as url:
        with pytest.raises(KimiError, match="the server serves null-model"):
            Target(url, "tiny").check()
        sharegpt = tmp_path / "texts.json"
        sharegpt.write_text(json.dumps([{"conversations": [{"value": f"a {i}"}, {"value": "b"}]} for i in range(10)]))
        with pytest.raises(KimiError, match=r"needs 10,752 tokens per request, the server's context has 1,024"):
            texts = Texts(sharegpt=str(sharegpt))
            bench(Plan([Target(url)], [load_workload("con2")]), texts, tmp_path / "runs", lambda _: None)

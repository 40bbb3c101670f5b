"""The workloads are the published commands, and bad ones are refused with one message."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.speed.bench import Plan, bench
from kimi_w4a8_lab.speed.texts import Texts, read_pairs
from kimi_w4a8_lab.speed.workloads import load_workload, with_changes, workload_names

PUBLISHED = {
    "--dataset-name": "random",
    "--random-input-len": "10240",
    "--random-output-len": "512",
    "--random-range-ratio": "1.0",
    "--request-rate": "inf",
}


@pytest.mark.parametrize(("name", "prompts", "concurrency"), [("con2", "10", "2"), ("con40", "160", "40")])
def test_con2_and_con40_are_the_published_commands(name: str, prompts: str, concurrency: str) -> None:
    [point] = load_workload(name).points()
    words = point.arguments(Path("f"))
    given = dict(pairwise(words))
    assert {key: given[key] for key in PUBLISHED} == PUBLISHED
    assert (given["--num-prompts"], given["--max-concurrency"]) == (prompts, concurrency)
    assert given["--backend"] == "sglang" and "--disable-ignore-eos" not in words


def test_every_packaged_workload_loads_and_expands() -> None:
    for name in workload_names():
        work = load_workload(name)
        assert len(work.points()) == len(work.concurrency) * len(work.seeds)


def test_a_sweep_scales_prompts_and_warm_ups_with_concurrency() -> None:
    points = load_workload("1k1k").points()
    assert [(p.num_prompts, p.warmups) for p in points if p.seed == 42] == [(10 * c, 2 * c) for c in (4, 8, 16, 32, 64)]
    assert "sglang-oai-chat" in points[0].arguments(Path("f"))


def test_a_changed_workload_is_no_published_point() -> None:
    assert with_changes(load_workload("con2"), seeds=[1]).reference == "con2"
    assert with_changes(load_workload("con2"), num_prompts=3).reference is None


RANDOM = "[x]\nsummary='s'\ndataset='random'\ntext='file'\noutput_len=9\n"
TALK = "[x]\nsummary='s'\ndataset='conversations'\ntext='file'\noutput_len=9\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RANDOM + "input_len=9\nconcurrency=[0]\nnum_prompts=1", "greater than 0"),
        (RANDOM + "concurrency=[1]\nnum_prompts=1", "input_len belongs"),
        (TALK + "concurrency=[1]", "either num_prompts"),
        (TALK + "concurency=[1]\nnum_prompts=1", "did you mean 'concurrency'"),
        ("x = 3", "1 workloads in one file"),
        ("[x]\n[y]", "2 workloads"),
    ],
)
def test_bad_workload_files_are_one_message(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(KimiError, match=message):
        load_workload(str(path))


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(KimiError, match="did you mean 'con40'"):
        load_workload("con4O")


def test_texts_of_every_format_are_read(tmp_path: Path) -> None:
    chat = [{"conversations": [{"value": "q"}, {"value": "a"}]}, {"conversations": [{"value": "alone"}]}]
    files = {
        "s.json": json.dumps(chat),
        "g.jsonl": '{"question": "q", "answer": "a"}\n',
        "p.jsonl": '{"prompt": "q", "response": "a"}\n',
        "t.txt": "q",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_pairs(tmp_path / name) == [("q", "" if name == "t.txt" else "a")]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("[{", "not valid JSON"), ("{}", "instead of a list"), ("[]", "no usable text")],
)
def test_missing_and_malformed_sharegpt_files(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KimiError, match=message):
        Texts(str(path)).prepare(load_workload("con2"))


def test_a_bad_prompts_file_is_found_before_a_server_is_asked_and_leaves_no_run(tmp_path: Path) -> None:
    path, nowhere, message = tmp_path / "mine.json", Target("http://127.0.0.1:9"), "not valid JSON"
    said: list[str] = []
    path.write_text("[{")
    sides = [Target(recipe="tiny:plain"), Target(recipe="tiny")]
    texts = Texts(prompts=str(path))
    with pytest.raises(KimiError, match=message):
        bench(Plan([nowhere], [load_workload("chat")]), texts, tmp_path / "runs", said.append)
    with pytest.raises(KimiError, match=message):
        bench(Plan(sides, [load_workload("chat")]), texts, tmp_path / "runs", said.append)
    assert said == [] and not (tmp_path / "runs").exists()

"""Data files: what is refused, and that our task asks and scores exactly as lm-eval's own gsm8k does."""

import json
import logging

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.eval import tasks


def problem(number, answer=None):
    return {
        "question": f"What is {number} + 1?\u2028Say it.",
        "answer": answer or f"It is <<{number}+1={number + 1}>>.\n#### {number + 1}",
    }


def write(folder, split, problems):
    lines = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in problems)
    (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))


SMALL = tasks.Task("kimi_gsm8k", "GSM8K", 10, False, 64, {"train": 20, "test": 6})


@pytest.fixture
def data(tmp_path):
    write(tmp_path, "train", [problem(i) for i in range(20)])
    write(tmp_path, "test", [problem(100 + i) for i in range(6)])
    return tmp_path


def test_good_files_are_found_by_split(data):
    assert tasks.check_data(data, SMALL) == {"train": data / "train.jsonl", "test": data / "test.jsonl"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "q"}, "line 3 is not a problem: no 'answer'"),
        ({"question": "q", "answer": "12"}, "line 3 has no question or no answer"),
        ({"question": "q", "answer": "work ####  "}, "line 3 has no question or no answer"),
        ({"question": " ", "answer": "#### 1"}, "line 3 has no question or no answer"),
        ('{"question": "cut', "line 3 is not a problem: Unterminated"),
        ("[]", "line 3 is not a problem"),
    ],
)
def test_a_bad_problem_is_named_by_its_line(data, line, message):
    write(data, "test", [problem(1), problem(2), line, problem(4), problem(5), problem(6)])
    with pytest.raises(KimiError, match=message) as caught:
        tasks.check_data(data, SMALL)
    assert caught.value.where.endswith("test.jsonl")


def test_a_part_of_the_data_is_refused(data):
    write(data, "test", [problem(i) for i in range(5)])
    with pytest.raises(KimiError, match="5 problems instead of 6"):
        tasks.check_data(data, SMALL)


def test_missing_and_binary_files_are_refused(data):
    (data / "test.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KimiError, match="cannot read the data"):
        tasks.check_data(data, SMALL)
    (data / "train.jsonl").unlink()
    with pytest.raises(KimiError, match="No such file") as caught:
        tasks.check_data(data, SMALL)
    assert "--data-dir" in caught.value.remedy


def test_our_task_asks_and_scores_as_lm_evals_own(data, tmp_path, monkeypatch):
    """Same prompts with the same ten examples, same stops, same scores; only the source of the data differs."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    files = tasks.check_data(data, SMALL)
    tasks.write_task(SMALL, tmp_path / "tasks", files)
    stock = {"include": str(_stock_file()), "task": "stock", "num_fewshot": 10, "dataset_path": "json"}
    stock |= {"dataset_name": None, "dataset_kwargs": {"data_files": {name: str(path) for name, path in files.items()}}}
    (tmp_path / "tasks" / "stock.yaml").write_text(json.dumps(stock))  # JSON is YAML
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    ours, theirs = manager.load(["kimi_gsm8k", "stock"])["tasks"].values()
    texts = []
    for task in (ours, theirs):
        task.set_fewshot_seed(1234)
        task.build_all_requests()
        texts.append([instance.args for instance in task.instances])
    assert texts[0] == texts[1] and len(texts[0]) == 6
    assert texts[0][0][0].count("Question:") == 11
    for answer in (" The sum is 101.\n#### 101", "1,001 apples", "$ 3.50", "#### 1,234.", "none", "-5 and 101."):
        results = []
        for task in (ours, theirs):
            for instance in task.instances:
                instance.resps, instance.filtered_resps = [answer], {}
            task.apply_filters()
            results.append(
                [
                    (
                        name,
                        instance.filtered_resps[name],
                        task.process_results(instance.doc, [instance.filtered_resps[name]]),
                    )
                    for instance in task.instances
                    for name in tasks.METRICS
                ]
            )
        assert results[0] == results[1]
    assert any(metrics["exact_match"] for _, _, metrics in results[0])  # "101" solves the first problem


def _stock_file():
    from pathlib import Path

    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"

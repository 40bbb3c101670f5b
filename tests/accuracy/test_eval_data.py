"""Data files: what is refused, and that our task asks and scores exactly as lm-eval's own gsm8k does."""

import json
import logging
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval.models import openai_completions
from lm_eval.tasks import TaskManager

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.accuracy import harness, tasks


def problem(number):
    answer = f"It is <<{number}+1={number + 1}>>.\n#### {number + 1}"
    return {"question": f"What is {number} + 1?\u2028Say it.", "answer": answer}


def write(folder, split, problems):
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in problems)
    (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))


SMALL = tasks.Task("kimi_gsm8k", "GSM8K", 10, False, 64, {"train": 20, "test": 6})


@pytest.fixture
def data(tmp_path):
    write(tmp_path, "train", [problem(i) for i in range(20)])
    write(tmp_path, "test", [problem(100 + i) for i in range(6)])
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "q"}, "line 3 is not a problem: answer: Field required"),
        ({"question": "q", "answer": "12"}, "line 3 is not a problem: answer: String should match"),
        ({"question": "q", "answer": "work ####  "}, "line 3 is not a problem: answer: String"),
        ({"question": " ", "answer": "#### 1"}, "line 3 is not a problem: question: String"),
        ('{"question": "cut', "line 3 is not a problem: Invalid JSON"),
        ("[]", "line 3 is not a problem"),
    ],
)
def test_a_bad_problem_is_named_by_its_line(data, line, message):
    write(data, "test", [problem(1), problem(2), line, problem(4), problem(5), problem(6)])
    with pytest.raises(KimiError, match=message) as caught:
        tasks.read_problems(data, SMALL)
    assert caught.value.where.endswith("test.jsonl")


def test_a_part_of_the_data_and_a_missing_file_are_refused(data):
    write(data, "test", [problem(i) for i in range(5)])
    with pytest.raises(KimiError, match="5 problems instead of 6"):
        tasks.read_problems(data, SMALL)
    (data / "train.jsonl").unlink()
    with pytest.raises(KimiError, match=r"cannot read the data .*: No such file") as caught:
        tasks.read_problems(data, SMALL)
    assert "--data-dir" in caught.value.remedy


def test_our_task_asks_and_scores_as_lm_evals_own(data):
    """Same prompts with the same ten examples, same stops, same scores; only the source of the data differs."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    problems = tasks.read_problems(data, SMALL)
    stock = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    stock |= {"task": "stock", "num_fewshot": 10, "dataset_path": "json"}
    stock["custom_dataset"] = harness.as_dataset(problems)
    stock = TaskManager(include_defaults=False).load([stock])
    ours = harness.load_task(tasks.Protocol(SMALL, False, 10, 64), problems)
    ours, theirs = (task for found in (ours, stock) for task in found["tasks"].values())
    theirs.set_fewshot_seed(1234)
    texts = []
    for task in (ours, theirs):
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


@pytest.mark.parametrize("chat", [False, True])
def test_a_request_is_that_of_lm_evals_own_client(chat):
    protocol = tasks.Protocol(tasks.GSM8K, chat, 10, 512)
    settings = {"do_sample": False, "temperature": 0.0, "until": ["Question:", "</s>", "<|im_end|>"]}
    prompt = json.dumps([{"role": "user", "content": "q"}]) if chat else "q"
    kind = openai_completions.LocalChatCompletion if chat else openai_completions.LocalCompletionsAPI
    theirs = kind(base_url="http://127.0.0.1:9", model="m", max_gen_toks=512, tokenizer_backend=None)
    sent = theirs._create_payload(json.loads(prompt) if chat else prompt, generate=True, gen_kwargs=dict(settings))
    if chat:
        del sent["stop"]  # a server would apply it to the thinking
    assert harness.request_body(protocol, "m", prompt, settings) == sent

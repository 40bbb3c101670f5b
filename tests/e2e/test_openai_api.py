"""A stock OpenAI client and its disconnects, and the way from the first request to a report."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.every_page import Shown
from support.said import stock_client
from support.waiting import until
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accuracy.problems import problems
from kimi_w4a8_lab.speed.runs import read_run
from proof.load.engine_loads import engine_loads

pytestmark = pytest.mark.server

MODEL = "kimi-k2.5-tiny"
QUESTION = [{"role": "user", "content": "Tom has 3 apples. Tom buys 4 more. How many apples does Tom have now?"}]


@pytest.fixture
def stock(eagle3):
    with stock_client(eagle3.base_url) as made:
        yield made


def answer(stock: Any) -> str:
    done = stock.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=96, temperature=0)
    return done.choices[0].message.content or ""


def test_a_client_that_disconnects_frees_its_cache(eagle3, stock):
    answer(stock)
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{eagle3.base_url}/v1/chat/completions", json=body, timeout=60) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 20:
                break  # leave in the middle of 4,000 tokens
    until(lambda: not any(engine_loads(eagle3.address).values()))
    assert answer(stock)


def test_a_persons_path_from_the_first_request_to_the_report(eagle3, tmp_path):
    """README's curl; then `bench` with prompts of one's own and `report`."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [command] = re.findall(r"^    (curl -s \S+/v1/chat/completions .*?\}')$", readme, re.MULTILINE | re.DOTALL)
    _, _, url, _, header, _, body = shlex.split(command.replace("\\\n", " "))
    url = url.replace("http://127.0.0.1:9527", eagle3.base_url)
    said = httpx.post(url, content=body, headers=[header.split(": ")], timeout=60.0).raise_for_status().json()
    assert said["choices"][0]["message"]["content"] and said["choices"][0]["finish_reason"] == "stop"

    rows = ({"question": problem.question, "answer": "1"} for problem in problems(4))
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["bench", "chat", "--base-url", str(eagle3.engine_file), "--prompts-file", str(tmp_path / "mine.jsonl")]
    Shown.of(tmp_path / "runs", "kimi_w4a8_eagle3", *words, "-c", "2", "-n", "4")
    [folder] = (tmp_path / "runs").iterdir()
    [found] = read_run(folder).usable
    assert found.load.completed == 4 and found.acceptance is not None and found.acceptance.length > 1.5
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    page = (folder / "report/report.html").read_text()
    assert f"{found.acceptance.length:.2f}" in page and "chat, c=2" in page

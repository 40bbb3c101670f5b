"""`kimi-w4a8 serve` as an operator runs it: ready, stopped, crashed, refused; nothing stays behind."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tomllib
import torch
from support import supervisor
from support.kimi_checkpoint import edit_tensor, rewrite
from support.repository import ROOT
from support.waiting import gone, until
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.supervision.checks import weights_digest
from kimi_w4a8_laptop import tiny
from proof.load.engine_loads import RUNNING, engine_loads
from proof.load.load import ClientLoad
from proof.load.load_questions import endless_question
from proof.load.load_request import ClientOutcome
from proof.load.served import ServedEngine

pytestmark = pytest.mark.server
READY = re.compile(r"tiny ready: after")


class Kimi(ServedEngine):
    """`kimi-w4a8 serve --recipe tiny` from the first second on."""

    @property
    def text(self) -> str:
        return " ".join(self.output.read_text(errors="replace").split())

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float = 280.0) -> None:
        end = time.monotonic() + timeout_s
        while not pattern.search(self.text):
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"no {pattern.pattern!r}, exit code {self.process.poll()}: ...{self.text[-2000:]}")
            time.sleep(0.3)

    def ops_until(self, path: str, status: int, timeout_s: float = 280.0) -> dict[str, Any]:
        """Wait until the ops endpoint answers with this status, and return the answer."""
        end = time.monotonic() + timeout_s
        while (answer := httpx.get(f"{self.ops_url}/{path}")).status_code != status:
            assert time.monotonic() < end, answer.text
            time.sleep(0.2)
        return answer.json()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


class ForkedKimi(Kimi, supervisor.ForkedEngine):
    """The same without its first ten seconds of imports."""


@pytest.fixture
def serve(tmp_path):
    with ExitStack() as started:

        def start(*arguments: str, forked: bool = True) -> Kimi:
            return started.enter_context((ForkedKimi if forked else Kimi)(tmp_path, arguments))

        yield start


def scheduler_of(family: list[psutil.Process]) -> psutil.Process:
    return next(p for p in family if "scheduler" in " ".join([p.name(), *p.cmdline()]))


def test_a_key_is_asked_for_and_shown_nowhere_and_ctrl_c_ends_everything(serve, tmp_path, monkeypatch):
    key = "a-key-for-this-test"
    (tmp_path / "key").write_text(f"{key}\n")
    (tmp_path / "key").chmod(0o600)
    kimi = serve("--api-key-file", "key", forked=False)
    kimi.wait_for(READY)  # the engine's warm-up and the canary prompts sent its secret
    family = kimi.family()
    assert len(family) >= 4  # fork server, engine, scheduler, detokenizer
    url = f"{kimi.base_url}/v1/completions"
    prompt = "what only this client knows"
    body = {"model": "kimi-k2.5-tiny", "prompt": prompt, "max_tokens": 2}
    sent = {"none": {}, "wrong": {"Authorization": f"Bearer {key}x"}, "right": {"Authorization": f"Bearer {key}"}}
    answers = {name: httpx.post(url, json=body, headers=headers, timeout=60) for name, headers in sent.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == {"none": 401, "wrong": 401, "right": 200}
    assert "needs a key" in answers["none"].json()["error"]["message"]
    assert httpx.get(f"{kimi.ops_url}/ready", timeout=60).status_code == 200
    monkeypatch.chdir(tmp_path)
    check = ["check", str(tiny.target_path()), "--record", "answers.json"]
    check += ["--base-url", f"{kimi.base_url}/v1", "--api-key-file", str(tmp_path / "key")]
    done = CliRunner().invoke(app, check)
    pinned = {"repo": str(tiny.target_path()), "sha256": weights_digest(tiny.target_path())}
    assert tomllib.loads(done.stdout) == {"model": {**pinned, "answers": str(tmp_path / "answers.json")}}, done.output
    (log,) = tmp_path.glob("runs/*/server.log")
    assert " ".join(log.read_text().split()[:20]) in kimi.text  # not on a terminal, so the engine's log is shown
    files = [tmp_path / "answers.json", ROOT / "launch/answers/tiny.json"]
    recorded, known = (json.loads(file.read_text()) for file in files)
    assert [recorded[part] for part in ("prompts", "answers")] == [known[part] for part in ("prompts", "answers")]
    scores, others = (np.concatenate(found["logprobs"]) for found in (recorded, known))
    assert np.abs(scores - others).mean() <= known["band"]
    shown = [*(" ".join(process.cmdline()) for process in family), kimi.text]
    shown += [path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [text for text in shown if key in text or prompt in text]
    kimi.process.send_signal(signal.SIGINT)
    assert kimi.process.wait(280) == 128 + signal.SIGINT
    assert gone(*family)
    assert "server.log" in kimi.text.rpartition("SIGINT received")[2]


@pytest.mark.slow
def test_a_scheduler_that_dies_brings_a_new_engine_and_sigterm_answers_what_runs(serve):
    kimi = serve()
    kimi.wait_for(READY)
    engine, scheduler = kimi.engine(), scheduler_of(kimi.family())
    at = time.time()
    os.kill(scheduler.pid, signal.SIGKILL)
    kimi.wait_ready(280, since=at)
    assert gone(engine, scheduler)
    assert "the engine ended by itself: its process sglang::scheduler is gone" in kimi.text
    assert kimi.status()["restarts"]["ended"] == 1
    question = endless_question("kimi-k2.5-tiny", 400)
    with ClientLoad(kimi.base_url, [question], 3, total=3, hang_s=280.0) as load:
        until(lambda: engine_loads(kimi.address, timeout_s=280.0)[RUNNING] == 3)
        assert kimi.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert load.wait(300)
    assert [record.outcome for record in load.records] == [ClientOutcome.OK] * 3
    assert not kimi.leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4], ids=["importing", "loading"])
def test_kill_9_of_kimi_leaves_no_process(serve, processes):
    kimi = serve(forked=processes > 1)
    until(lambda: len(kimi.family()) >= processes)  # fork server, engine, scheduler, detokenizer, in this order
    family = kimi.family()
    kimi.process.kill()
    kimi.process.wait()
    assert gone(*family)


@pytest.mark.slow
def test_a_draft_of_another_target_fails_loudly(serve, tmp_path):
    """Random draft weights: everything loads and answers, but nothing is accepted."""
    draft = tmp_path / "draft"
    shutil.copytree(tiny.draft_path(), draft)
    torch.manual_seed(0)
    rewrite(draft, lambda t: t.update({name: torch.randn_like(w.float()).to(w.dtype) for name, w in t.items()}))
    kimi = serve("--draft", str(draft))
    assert kimi.process.wait(280) == 1
    assert "accept length 1.0" in kimi.text and "--speculative-algorithm is EAGLE3" in kimi.text


def test_a_truncated_checkpoint_is_refused_before_anything_starts(serve, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.target_path(), model)
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    kimi = serve("--model", str(model))
    assert kimi.process.wait(280) == 1
    assert shard.name in kimi.text
    assert not list(tmp_path.glob("runs/*/server.log"))


@pytest.mark.slow
def test_a_nan_in_a_norm_is_never_ready(serve, tmp_path):
    """SGLang makes the logits finite, and every answer would be "" with status 200."""
    model = tmp_path / "model"
    shutil.copytree(tiny.target_path(), model)
    norm = "language_model.model.layers.0.input_layernorm.weight"
    edit_tensor(model, norm, lambda w: w.index_fill(0, torch.tensor(5), float("nan")))
    kimi = serve("--model", str(model), "--no-preflight")
    assert kimi.process.wait(280) == 1
    assert re.search(r"the model computes nonsense: \d+ rows of logits were NaN", kimi.text), kimi.text[-500:]


@pytest.mark.slow
def test_an_engine_that_hangs_is_not_ready_and_is_restarted_with_its_stacks_when_it_does_not_come_back(serve, tmp_path):
    """The HTTP server goes on answering while the scheduler stands still, and the ops endpoint while both do."""
    kimi = serve("--set", "options.progress_timeout_s=15", "--set", "options.unready_after_s=2")
    kimi.wait_for(READY)
    family, ready = kimi.family(), f"{kimi.base_url}/ready"
    assert httpx.get(ready, timeout=60).status_code == 200
    os.kill(scheduler_of(family).pid, signal.SIGSTOP)
    stalled = kimi.ops_until("ready", 503)
    assert stalled["phase"] == "stalled" and "its process sglang::scheduler is stopped" in stalled["reason"]
    until(lambda: httpx.get(ready, timeout=60).status_code == 503)  # smg asks there; the gateway looks every 0.25 s
    os.kill(scheduler_of(family).pid, signal.SIGCONT)
    kimi.ops_until("ready", 200)
    os.kill(scheduler_of(family).ppid(), signal.SIGSTOP)
    assert "its HTTP server has not answered for" in kimi.ops_until("ready", 503)["reason"]
    os.kill(scheduler_of(family).ppid(), signal.SIGCONT)
    kimi.ops_until("ready", 200)
    at = time.time()
    os.kill(scheduler_of(family).pid, signal.SIGSTOP)
    kimi.wait_event(lambda event: event.event == "restarting", at, 280)
    kimi.wait_ready(280, since=at)
    assert "no token was generated for 15 s" in kimi.text and kimi.status()["restarts"]["stalled"] == 1
    assert "Current thread 0x" in next(tmp_path.glob("runs/*/server.log")).read_text()

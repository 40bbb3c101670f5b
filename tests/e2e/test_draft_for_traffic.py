"""A draft for one's own traffic, short: a real server collects, its engine captures, the draft learns and is better."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.plain_target import PlainTarget
from support.sglang_program import environment
from support.tiny_servers import TWO_RANKS
from support.waiting import until
from tokenizers import Tokenizer

from kimi_w4a8_eagle3.base.collection import REQUESTS, VARIABLE, Consent, read_consent
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_lab.draft.collected import read_collected, read_ids, read_requests, store_ids
from kimi_w4a8_lab.draft.states import StoredStates
from kimi_w4a8_laptop import tiny
from proof.draft_demo import ask, bodies, kimi

pytestmark = [pytest.mark.server, pytest.mark.slow]
COUNT = 32  # requests, half of them with a schema


@pytest.fixture(scope="module")
def collected(eagle3: FrontedEngine) -> Path:
    """The folder of a server that was asked once without consent, and then with it."""
    folder = Path(eagle3.engine.env[VARIABLE])
    ask(eagle3.base_url, bodies(2, seed=1))
    assert not (folder / REQUESTS).exists()
    Consent(share=1.0, tokenizer=read_consent(folder).tokenizer).write(folder)
    time.sleep(2.1)  # an engine reads the consent again after two seconds
    answers = ask(eagle3.base_url, bodies(COUNT, seed=1))
    until(lambda: sum(len(read_requests(file)) for file in (folder / REQUESTS).glob("*/*")) == COUNT)
    kimi("draft", "collect", folder, "--off")
    (folder / "answers.json").write_text(json.dumps([choices[0]["message"]["content"] for choices in answers]))
    return folder


def test_what_was_answered_is_stored_as_ids_and_no_text(collected: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
    found = read_collected(collected, 4096)
    said = json.loads((collected / "answers.json").read_text())
    stored = [tokenizer.decode(list(one.tokens[begin:end])) for one in found for begin, end in one.replies]
    assert sorted(set(stored)) == sorted(set(said))
    assert {one.kind for one in found} == {"all", "all-structured"}
    assert not any(b"warehouse" in file.read_bytes() for file in (collected / REQUESTS).glob("*/*"))


def require_states(folder: Path, count: int) -> None:
    """Check all files of states, and `count` of them against the target in transformers."""
    target, found = PlainTarget(), read_collected(folder, 4096)
    stored = StoredStates(folder / "states", 384)
    states = [stored.of(one.name, len(one.tokens)).float() for one in found]
    for one, captured in zip(found[:count], states, strict=False):
        plain = target.states(list(one.tokens), (2, 3, 4))
        # BF16 has 8 bits, and three layers add up their roundings. A near tie of two experts changes a whole token.
        apart = (captured - plain).norm(dim=-1) / plain.norm(dim=-1)
        assert float(apart.median()) < 2**-6 and float((apart < 2**-4).float().mean()) > 0.9


def test_the_newest_release_captures_on_two_ranks_and_continues_after_ctrl_c(collected: Path, tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    folder.mkdir(mode=0o700)
    Consent(tokenizer=read_consent(collected).tokenizer).write(folder)
    rows = [one.tokens[at:] for one in read_collected(collected, 4096) for at in range(8)]
    (tmp_path / "rows").write_text("".join(json.dumps({"prompt": row[:9], "answer": row[9:]}) + "\n" for row in rows))
    assert store_ids(read_ids(tmp_path / "rows", "shifted"), folder, "shifted") == len(rows)
    path = f"env.PYTHONPATH={environment(newest=True)['PYTHONPATH']}"
    settings = [word for setting in (path, *TWO_RANKS) for word in ("--set", setting)]
    words = ("draft", "states", folder, "--recipe", "tiny", "--runs", tmp_path / "runs", *settings)
    files = folder / "states"

    def interrupt() -> None:
        until(lambda: any(files.glob("*.safetensors")))
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        assert kimi(*words) == 130
    first = {file: file.stat().st_mtime_ns for file in files.glob("*.safetensors")}
    assert 0 < len(first) < len(rows)
    assert kimi(*words) == 0
    require_states(folder, 3)
    assert all(file.stat().st_mtime_ns == at for file, at in first.items()) and not list(files.glob("*.tmp"))


def test_the_draft_learns_the_kind_of_text_that_it_did_not_know(collected: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = ("--recipe", "tiny", "--runs", tmp_path)
    kimi("draft", "states", collected, *recipe)
    require_states(collected, 4)
    only, short = ("--kind", "all-structured"), ("--epochs", 5, "--batch", 2, "--lr", 1e-2)
    kimi("draft", "train", collected, "--recipe", "tiny", "--to", tmp_path / "new", *only, *short)
    page = tmp_path / "page"
    assert kimi("draft", "compare", collected, *recipe, *only, "--new", tmp_path / "new", "--output", page) == 0
    assert "all-structured: better" in (page / "report.html").read_text()

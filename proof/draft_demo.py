"""`python -m proof.draft_demo`, `make draft`: a draft that knows its traffic, on a CPU, in minutes.

Two servers of the built-in model behind smg answer questions of two kinds: in words, on which their draft was trained,
and in the client's own schema, of which it has seen nothing. The requests are collected. The draft is trained on them
and on conversations that it knows, compared on held-out ones, and exchanged while clients ask. The answers must stay
the same.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import typer
from tokenizers import Tokenizer

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, new_run_dir
from kimi_w4a8_eagle3.cli import app as kimi_app
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.accuracy.problems import MOST, problems
from kimi_w4a8_laptop import tiny
from kimi_w4a8_laptop.tiny.tokenizer import IM_END, THINK_END, chat_text

from .load.behind_smg import Smg, behind_smg, renew_one_by_one
from .load.served import ServedEngine

SEED = 52
_OPERATION = re.compile(r"\d+ [-+*/] \d+ = ")
STATES = ("delivery_pending", "delivered_to_customer", "refund_requested")
NOTE = {
    "type": "object",
    "properties": {
        "warehouse_city": {"type": "string", "enum": ("Amsterdam", "Bratislava", "Casablanca", "Dubrovnik")},
        "shipment_status": {"type": "string", "enum": STATES},
        "quantity_requested": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["warehouse_city", "shipment_status", "quantity_requested"],
    "additionalProperties": False,
}  # fmt: skip


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of both kinds in turn: a question in words, and one whose answer has the client's schema."""
    made, rng = [], random.Random(seed)
    for at, problem in enumerate(problems(count, seed=seed)):
        body: dict[str, Any] = {"model": "kimi-k2.5-tiny", "temperature": 0, "max_tokens": 160, "logprobs": True}
        body |= {"chat_template_kwargs": {"thinking": False}}
        question = problem.question
        if at % 2:
            question = f"{question}\nFill in the delivery note, order {rng.randint(100, 999)}."
            schema = {"name": "note", "schema": NOTE, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        made.append({**body, "messages": [{"role": "user", "content": question}]})
    return made


def import_known(file: Path, count: int) -> None:
    """Write conversations of the kind that the draft was trained on, as a public set would have them.

    They are the built-in problems that `bodies` leaves with the demo's seed, half of them with thinking.
    """
    tokenizer = Tokenizer.from_file(str(tiny.target_path() / "tokenizer.json"))
    with file.open("w") as rows:
        for at, problem in enumerate(problems(MOST, seed=SEED)[-count:]):
            *steps, last, answer = problem.solution.splitlines()
            told = f"{_OPERATION.sub('', last)}\n{answer}"
            asked, said = chat_text(problem.question), "\n".join((*steps, last)) + f"{THINK_END}{told}"
            if at % 2:
                asked, said = asked + THINK_END, problem.solution
            prompt, reply = (tokenizer.encode(text).ids for text in (asked, said + IM_END))
            rows.write(json.dumps({"prompt": prompt, "answer": reply}) + "\n")


def ask(base_url: str, asked: Sequence[dict[str, Any]], clients: int = 8) -> list[Any]:
    """Return the choices of the answers, with their logprobs; raise KimiError for any other status than 200."""
    with httpx.Client(timeout=240.0) as http, ThreadPoolExecutor(clients) as pool:

        def one(body: dict[str, Any]) -> Any:
            answer = http.post(f"{base_url}/v1/chat/completions", json=body)
            if answer.status_code != 200:
                raise KimiError(f"a request was answered with {answer.status_code}", base_url, answer.text[:200])
            return answer.json()["choices"]

        return list(pool.map(one, asked))


def kimi(*words: object) -> int:
    """Run `kimi-w4a8` in this process, show the command, and return its exit code."""
    typer.secho(f"\n$ kimi-w4a8 {' '.join(map(str, words))}", bold=True)
    try:
        kimi_app([str(word) for word in words], prog_name="kimi-w4a8")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def renewed_under_load(front: Smg, servers: Sequence[ServedEngine], asked: Sequence[dict[str, Any]]) -> int:
    """Restart the servers one by one while clients ask; return the number of requests, all of which were answered."""
    answered = 0
    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew_one_by_one, front, servers)
        while not renewing.done():
            answered += len(ask(front.base_url, asked, 2))
        renewing.result()
    return answered


def main(
    requests: int = typer.Option(120, "--requests", min=24, help="Requests to collect, half of each kind."),
    known: int = typer.Option(240, "--known", min=10, help="Conversations to import of what the draft knows already."),
    runs: Path = typer.Option(DEFAULT_ROOT, "--runs", help="Folder of the run directories."),
) -> None:
    """Collect, train, compare, switch and go back, with two servers of the built-in model on this machine's CPU."""
    import torch  # start-up: torch

    torch.set_num_threads(1)
    began, folder = time.monotonic(), new_run_dir("draft-demo", runs).resolve()
    link, collected, new = folder / "draft", folder / "collected", folder / "draft-2"
    link.symlink_to(tiny.draft_path())
    recipe = ("--recipe", "tiny", "--runs", folder)
    kimi("draft", "collect", collected, "--share", 1)
    import_known(folder / "known.jsonl", known)
    kimi("draft", "collect", collected, "--from", folder / "known.jsonl", "--as", "known")
    settings = ("--set", f"draft.repo={link}", "--set", f"env.KIMI_COLLECT={collected}")
    with behind_smg(folder, settings) as (front, servers):
        asked = bodies(requests, SEED)
        _said(began, f"two servers answer; asking {requests} questions, half of them with a schema of the client's own")
        before = ask(front.base_url, asked)
        time.sleep(1)  # an engine stores what ended in the last half second
        kimi("draft", "collect", collected, "--off")
        if kimi("draft", "states", collected, *recipe):
            raise KimiError("the states were not captured", str(folder))
        _said(began, "training")
        if kimi("draft", "train", collected, "--recipe", "tiny", "--to", new, "--epochs", 6, "--lr", 8e-3, "--keep", 3):
            raise KimiError("the draft was not trained", str(folder))
        code = kimi("draft", "compare", collected, *recipe, "--new", new, "-o", folder / "page")
        if code == 0:
            kimi("draft", "switch", link, "--to", new)
            answered = renewed_under_load(front, servers, asked[:4])
            _said(began, f"both serve the new draft; {answered} of {answered} requests meanwhile were answered")
            after = ask(front.base_url, asked)
            same = sum(one == other for one, other in zip(before, after, strict=True))
            _said(began, f"{same} of {len(asked)} answers are the same with the new draft, bit for bit with logprobs")
            code = 0 if same == len(asked) else 3
            kimi("draft", "switch", link, "--back")
    _said(began, f"page: {folder / 'page' / 'report.html'}")
    raise typer.Exit(code)


def _said(began: float, text: str) -> None:
    typer.secho(f"[{time.monotonic() - began:4.0f} s] {text}", bold=True)


if __name__ == "__main__":
    run(lambda: typer.run(main))

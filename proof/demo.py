"""`python -m proof.demo`, `make demo`: the built-in model on SGLang, with and without speculation, as one table.

Both servers hold the same conversation with a calculator, and answer the same questions greedily, in turns as in
`bench ab`. The tokens must be the same, and the times are compared by pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from kimi_w4a8_eagle3.base.calculator import declaration, results
from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation
from kimi_w4a8_eagle3.engine.fronted import FrontedEngine
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_eagle3.supervision.checks import checked
from kimi_w4a8_eagle3.supervision.serve import Terminated, signals_raise
from kimi_w4a8_lab.accuracy.problems import parse_answer, problems
from kimi_w4a8_lab.accuracy.tokens import TokenClient
from kimi_w4a8_lab.base.other_programs import busy, watched
from kimi_w4a8_lab.report import page as report
from kimi_w4a8_lab.report.measured import factor
from kimi_w4a8_lab.report.page import Page, Section, Words, write_page
from kimi_w4a8_lab.speed.statistics import DRAWS, Interval

FOR_TOOLS = "On a farm there are 6 hens and 3 cows. How many legs are there in all?"
PAIRS, EACH = 5, 4
QUESTIONS = PAIRS * EACH
CONCURRENCY = 2
MAX_TOKENS = 192
LOAD = f"{PAIRS} pairs of {EACH} requests at concurrency {CONCURRENCY}, greedy"
_COLUMNS = ("", "W4A8", "W4A8 + EAGLE3", "times as good")
_CAPTION = "medians over the pairs, with the 95% interval of the ratio"
_INTRO = """A small Kimi-K2.5-shaped model, quantized to W4A8 by AMD Quark, served by SGLang on this machine:
once without speculation, once with EAGLE3 (3 steps, topk 1, 4 draft tokens)."""


@dataclass
class Side:
    """Results of one of the two servers. seconds: of each block of `EACH` questions."""

    name: str
    ready_s: float
    conversation: list[Generation] = field(default_factory=list)
    answers: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    acceptance: Acceptance | None = None

    def block(self, pair: int) -> dict[str, float]:
        answers = self.answers[pair * EACH : (pair + 1) * EACH]
        return {
            "TPOT, ms": float(np.median([answer.tpot_ms for answer in answers])),
            "throughput, tok/s": sum(len(answer.token_ids) for answer in answers) / self.seconds[pair],
            "TTFT, ms": float(np.median([answer.ttft_ms for answer in answers])),
        }


@dataclass(frozen=True)
class PairedFigure:
    """One figure of both sides: medians, and how many times as good EAGLE3 is; no verdict if that interval has 1."""

    title: str
    plain: float
    fast: float
    times: Interval

    @property
    def verdict(self) -> str:
        return "the same within its interval" if self.times.covers(1) else "better" if self.times.value > 1 else "worse"


def paired_figures(plain: Side, fast: Side) -> list[PairedFigure]:
    blocks, found = [(plain.block(pair), fast.block(pair)) for pair in range(PAIRS)], []
    for title in blocks[0][0]:
        pairs = np.asarray([(a[title], b[title]) for a, b in blocks])
        times = pairs[:, 1] / pairs[:, 0] if title.startswith("throughput") else pairs[:, 0] / pairs[:, 1]
        drawn = np.median(np.random.default_rng(0).choice(times, (DRAWS, PAIRS)), axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        ratio = Interval(float(np.median(times)), float(low), float(high))
        found.append(PairedFigure(title, float(np.median(pairs[:, 0])), float(np.median(pairs[:, 1])), ratio))
    return found


def demonstrate(runs: Path = DEFAULT_ROOT, console: Console | None = None) -> Path:
    """Run the demo; returns its run directory. Raises KimiError when a server fails or the two texts differ."""
    console = console or table_console()
    folder = new_run_dir("demo", runs)
    console.print(Panel.fit(f"{_INTRO}\nLogs and results: {folder}", title="demo", border_style="cyan"))
    launches = [_launch(speculate) for speculate in (False, True)]
    launches[0].engine(folder / f"{_label(launches[0])}-server.log").prepare()  # while the checkpoints are examined
    questions = problems(QUESTIONS)

    with signals_raise(), ExitStack() as engines:
        # Both start at once; whichever is not measured sleeps, and uses no processor time.
        servers = [_start(engines, launch, folder) for launch in launches]
        sides = list[Side]()
        for server in servers:
            with console.status(f"{server.engine.name}: starting SGLang; its log is {server.log_path}"):
                sides.append(Side(server.engine.name, server.wait_ready(240.0)))
            console.print(f"[green]✓[/] {server.engine.name}: ready after {sides[-1].ready_s:.0f} s")
        plain, fast = sides
        clients = [engines.enter_context(TokenClient(*server.address)) for server in servers]
        for side, server in zip(sides, servers, strict=True):
            with EngineClient(*server.address) as client:
                side.conversation = _converse(client, side.name, console)
        others = _measure(sides, clients, [problem.question for problem in questions], console)
        ending = engines.enter_context(ThreadPoolExecutor(len(servers)))
        for server in servers:
            ending.submit(server.stop, 0.0)
    fast.acceptance = startup_check.require_acceptance(fast.answers, launches[1].num_draft_tokens or 1, "tiny")

    pairs = zip(plain.answers, fast.answers, strict=True)
    differences = [i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids]
    talked = [[turn.token_ids for turn in side.conversation] for side in sides]
    same = not differences and talked[0] == talked[1]
    correct = sum(parse_answer(a.text) == q.answer for a, q in zip(fast.answers, questions, strict=True))
    found = paired_figures(plain, fast)
    table = Table(*_COLUMNS, title=LOAD, title_style="bold", caption=_CAPTION)
    for row in _rows(fast, found):
        table.add_row(*row)
    console.print(table)
    if line := busy(others):
        console.print(line, style="yellow", markup=False)
    console.print(_verdict(QUESTIONS - len(differences), talked[0] == talked[1], correct, found, folder))
    record = {"kind": "demo", "others": others, "different_answers": differences, "solved": correct}
    write_json(folder / "result.json", record | {"w4a8": asdict(plain), "eagle3": asdict(fast)})
    console.print(f"page: {write_page(page(plain, fast, same, correct, others, folder), folder)}", markup=False)
    console.print("next: .venv/bin/kimi-w4a8 serve tiny   # an OpenAI server with this model", markup=False)
    if not same:
        raise KimiError(
            f"{len(differences)} of {QUESTIONS} greedy answers, or turns with the calculator, differ with speculation",
            where=str(folder / "result.json"),
            expected="the same tokens: speculation changes speed, not answers",
            remedy="`kimi-w4a8 eval lossless` tells a numerical tie from a bug",
        )
    return folder


def _launch(speculate: bool) -> Launch:
    """The tiny recipe on a free port; without speculation its draft arguments are switched off."""
    return render(load_recipe("tiny" if speculate else "tiny:plain"), [f"port={free_port()}"])


def _start(engines: ExitStack, launch: Launch, folder: Path) -> FrontedEngine:
    """Start one server; `engines` ends it."""
    name = "W4A8 + EAGLE3" if launch.draft else "W4A8"
    launch = checked(launch)
    write_json(folder / f"{_label(launch)}-{RECORD}", record("demo", {launch.name: launch.described()}, launch.env))
    server = launch.server(folder / f"{_label(launch)}-server.log", name)
    engines.enter_context(server)
    engines.callback(server.stop, 0.0)  # no client waits for an answer any more
    return server


def _measure(sides: Sequence[Side], clients: Sequence[TokenClient], asked: Sequence[str], console: Console) -> float:
    """Let the sides answer in turns, A B, B A and so on; return the share of the cores that other programs used."""
    prompts, share = [clients[0].chat_ids(q, clients[0].model_name()) for q in asked], watched()
    with Progress(console=console) as progress, ThreadPoolExecutor(CONCURRENCY) as pool:
        shown = progress.add_task(f"{QUESTIONS} questions to both, in turns", total=2 * QUESTIONS)
        for pair in range(PAIRS):
            block = prompts[pair * EACH : (pair + 1) * EACH]
            for at in (0, 1) if pair % 2 == 0 else (1, 0):
                began = time.monotonic()
                sides[at].answers += pool.map(partial(clients[at].timed, max_new_tokens=MAX_TOKENS), block)
                sides[at].seconds.append(time.monotonic() - began)
                progress.advance(shown, EACH)
    return share()


def _label(launch: Launch) -> str:
    return "eagle3" if launch.draft else "w4a8"


def _converse(client: EngineClient, name: str, console: Console) -> list[Generation]:
    """Let the model use a calculator until it answers, and show it: question, thinking, calls, results, answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": FOR_TOOLS}]
    turns: list[Generation] = []
    shown = Text(FOR_TOOLS, style="bold")
    while len(turns) < 8:
        message, turn = client.reply(messages, MAX_TOKENS, tools=[declaration()])
        messages.append(message)
        turns.append(turn)
        shown.append(f"\n{message.get('reasoning_content') or ''}", style="dim italic")
        answered = results(message)
        for call, result in zip(message.get("tool_calls") or (), answered, strict=True):
            function = call["function"]
            shown.append(f"\n{function['name']}({function['arguments']}) -> {result['content']}", style="cyan")
        if not answered:
            break
        messages += answered
    shown.append(f"\n{turns[-1].text}")
    console.print(Panel.fit(shown, title=f"{name} with a calculator", border_style="green"))
    return turns


def _rows(fast: Side, found: Sequence[PairedFigure]) -> list[list[str]]:
    rows = [[one.title, f"{one.plain:.1f}", f"{one.fast:.1f}", factor(one.times)] for one in found]
    if accept := fast.acceptance:
        rows.append(["accept length", "", f"{accept.length:.2f} of 4", ""])
        shares = ", ".join(f"{share:.0%}" for share in accept.per_position)
        rows.append(["accepted at position 1, 2, 3", "", shares, ""])
    return rows


def page(plain: Side, fast: Side, same: bool, correct: int, others: float, folder: Path) -> Page:
    """The page of the demo: what is the same, what is faster, and the figures."""
    found = paired_figures(plain, fast)
    title = f"{'PASS' if same else 'FAIL'}: EAGLE3 gives {'the same' if same else 'OTHER'} tokens; {_speed(found)}"
    scope = f"The built-in model on {psutil.cpu_count()} cores, no GPU, {date.today()}."
    verdicts = [Words(f"{correct} of {QUESTIONS} held-out problems solved. {scope}")]
    verdicts += [Words(busy(others), "worse")] if busy(others) else []
    answers = [(f"answer {n}", a.text) for n, a in enumerate(fast.answers, start=1)]
    measured = Section("Measured", tables=[report.Table(_COLUMNS, _rows(fast, found), _CAPTION)])
    chart = None
    if find_spec("matplotlib"):
        from kimi_w4a8_lab.report.plots import panel

        bars = [report.Bar(one.title.partition(",")[0], "EAGLE3 against W4A8", False, one.times) for one in found]
        chart = panel("speed", "times as good as without EAGLE3", bars)
    about = f"Demo: the built-in W4A8 model, with and without EAGLE3. {LOAD}, in {folder.name}."
    closed = Section("Answers with EAGLE3", listings=answers, closed=True)
    return Page(title, verdicts, about, chart, sections=[measured, closed], tone="better" if same else "worse")


def _speed(found: Sequence[PairedFigure]) -> str:
    return ", ".join(f"{one.title.partition(',')[0]} {one.times.value:.2f}x ({one.verdict})" for one in found)


def _verdict(alike: int, same_talk: bool, correct: int, found: Sequence[PairedFigure], folder: Path) -> Panel:
    same, turns = same_talk and alike == QUESTIONS, "all turns" if same_talk else "not all turns"
    text = (
        f"{'[green]✓' if same else '[red]✗'} {alike} of {QUESTIONS} greedy answers and {turns} with the calculator "
        f"have the same tokens with and without EAGLE3[/]\n{correct} of {QUESTIONS} held-out problems solved\n"
        f"EAGLE3: {_speed(found)}\nEverything is in {folder}"
    )
    return Panel.fit(text, border_style="green" if same else "red")


def main(runs: Path = typer.Option(DEFAULT_ROOT, "--runs", help="Where the run directory is created.")) -> None:
    """Serve the built-in model with and without EAGLE3, compare texts and speed (about a minute on 2 cores)."""
    try:
        demonstrate(runs)
    except Terminated as stopped:
        typer.echo(f"\nkimi-w4a8: {stopped} received; the servers were stopped", err=True)
        raise typer.Exit(stopped.exit_code) from None


if __name__ == "__main__":
    run(lambda: typer.run(main))

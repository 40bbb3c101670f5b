"""`python -m proof.demo`, `make demo`: the whole chain here, with and without speculation, as one table.

The built-in W4A8 checkpoint is served by SGLang twice: without a draft and with EAGLE3. Both hold the same conversation
with a calculator. Then they answer the same questions greedily, taking turns as in `bench ab`: the tokens must be the
same, and the times are compared by pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
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

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.chat.calculator import declaration, results
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.door.settings import without_keys
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation, TimedGeneration
from kimi_w4a8_eagle3.engine.metrics import Acceptance
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.fleet.checks import checked
from kimi_w4a8_eagle3.fleet.serve import Terminated, signals_raise
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_lab.accuracy.problems import parse_answer
from kimi_w4a8_lab.accuracy.tokens import TokenClient
from kimi_w4a8_lab.report import page as report
from kimi_w4a8_lab.report.measured import factor
from kimi_w4a8_lab.report.page import Page, Section, Words, write_page
from kimi_w4a8_lab.speed.statistics import DRAWS, Interval

from .tiny.problems import WordProblem, problems

FOR_TOOLS = "On a farm there are 6 hens and 3 cows. How many legs are there in all?"
PAIRS, EACH = 5, 4
QUESTIONS = PAIRS * EACH
CONCURRENCY = 2
MAX_TOKENS = 192
MAX_TURNS = 8
LOAD = f"{PAIRS} pairs of {EACH} requests at concurrency {CONCURRENCY}, greedy"
_OTHERS = 0.15  # share of the cores that other programs may use while times are taken
_READY_TIMEOUT_S = 240.0
_INTRO = """A small Kimi-K2.5-shaped model, quantized to W4A8 by AMD Quark, served by SGLang on this machine:
once without speculation, once with EAGLE3 (3 steps, topk 1, 4 draft tokens)."""


@dataclass
class Side:
    """Results of one of the two servers. seconds: of each block of `EACH` questions."""

    name: str
    ready_s: float
    conversation: list[Generation] = field(default_factory=list)
    answers: list[TimedGeneration] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    acceptance: Acceptance | None = None

    def block(self, pair: int) -> dict[str, float]:
        """Return TPOT, throughput and TTFT of a block."""
        answers = self.answers[pair * EACH : (pair + 1) * EACH]
        return {
            "TPOT, ms": float(np.median([answer.tpot_ms for answer in answers])),
            "throughput, tok/s": sum(len(answer.token_ids) for answer in answers) / self.seconds[pair],
            "TTFT, ms": float(np.median([answer.ttft_ms for answer in answers])),
        }


@dataclass(frozen=True)
class PairedFigure:
    """One figure of both sides: medians over the pairs, and how many times as good EAGLE3 is in the median pair."""

    title: str
    plain: float
    fast: float
    times: Interval

    @property
    def verdict(self) -> str:
        """Return a word; a difference counts if the interval leaves out 1."""
        return "the same within its interval" if self.times.covers(1) else "better" if self.times.value > 1 else "worse"

    @property
    def row(self) -> list[str]:
        return [self.title, f"{self.plain:.1f}", f"{self.fast:.1f}", factor(self.times)]


def paired_figures(plain: Side, fast: Side) -> list[PairedFigure]:
    blocks, found = [(plain.block(pair), fast.block(pair)) for pair in range(PAIRS)], []
    for title in blocks[0][0]:
        pairs = np.asarray([(a[title], b[title]) for a, b in blocks])
        times = pairs[:, 1] / pairs[:, 0] if title.startswith("throughput") else pairs[:, 0] / pairs[:, 1]
        drawn = np.median(np.random.default_rng(0).choice(times, (DRAWS, PAIRS)), axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        ratio = Interval(float(np.median(times)), float(low), float(high))
        a, b = np.median(pairs, axis=0)
        found.append(PairedFigure(title, float(a), float(b), ratio))
    return found


def demonstrate(runs: Path = DEFAULT_ROOT, console: Console | None = None) -> Path:
    """Run the demo; returns its run directory. Raises KimiError when a server fails or the two texts differ."""
    console = console or table_console()
    folder = new_run_dir("demo", runs)
    console.print(Panel.fit(f"{_INTRO}\nLogs and results: {folder}", title="demo", border_style="cyan"))
    launches = [_launch(speculate) for speculate in (False, True)]
    launches[0].server(_log(launches[0], folder)).prepare()  # while the checkpoints are examined
    questions = problems("held_out", QUESTIONS)

    with signals_raise(), ExitStack() as engines:
        # Both start at once; whichever is not measured sleeps, and uses no processor time.
        servers = [_start(engines, launch, folder) for launch in launches]
        plain, fast = sides = [Side(server.name, _ready(server, console)) for server in servers]
        clients = [engines.enter_context(TokenClient(server.base_url)) for server in servers]
        for side, client in zip(sides, clients, strict=True):
            side.conversation = _converse(client, side.name, console)
        others = _measure(sides, clients, questions, console)
        ending = engines.enter_context(ThreadPoolExecutor(len(servers)))
        for server in servers:
            ending.submit(server.stop, 0.0)
    fast.acceptance = startup_check.require_acceptance(fast.answers, launches[1].num_draft_tokens or 1, "tiny")

    differences = [
        i for i, (a, b) in enumerate(zip(plain.answers, fast.answers, strict=True)) if a.token_ids != b.token_ids
    ]
    talked = [[turn.token_ids for turn in side.conversation] for side in sides]
    same = not differences and talked[0] == talked[1]
    correct = sum(parse_answer(a.text) == q.answer for a, q in zip(fast.answers, questions, strict=True))
    found = paired_figures(plain, fast)
    console.print(_table(plain, fast, found))
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


def busy(others: float) -> str:
    """Return a warning if other programs used many of the cores while times were taken; empty otherwise."""
    used = f"Other programs used {others:.0%} of this machine's cores meanwhile"
    return "" if others < _OTHERS else f"{used}: measure again before you use the times."


def _launch(speculate: bool) -> Launch:
    """The tiny recipe on a free port; without speculation its draft arguments are switched off."""
    launch = render(load_recipe("tiny" if speculate else "tiny:plain"), [f"port={free_port()}"])
    return replace(launch, env={**launch.env, **without_keys()})


def _start(engines: ExitStack, launch: Launch, folder: Path) -> EngineServer:
    """Start one server; `engines` ends it."""
    name = "W4A8 + EAGLE3" if launch.draft else "W4A8"
    launch = checked(launch)
    write_json(folder / f"{_label(launch)}-{RECORD}", record("demo", {launch.name: launch.described()}, launch.env))
    server = launch.server(_log(launch, folder), name)
    engines.enter_context(server)
    engines.callback(server.stop, 0.0)  # no client waits for an answer any more
    return server


def _ready(server: EngineServer, console: Console) -> float:
    """Wait until it answers; the seconds since its start."""
    with console.status(f"{server.name}: starting SGLang; its log is {server.log_path}"):
        seconds = server.wait_ready(_READY_TIMEOUT_S)
    console.print(f"[green]✓[/] {server.name}: ready after {seconds:.0f} s")
    return seconds


def _measure(
    sides: Sequence[Side], clients: Sequence[TokenClient], questions: Sequence[WordProblem], console: Console
) -> float:
    """Let the sides answer in turns, A B, B A and so on; return the share of the cores that other programs used."""
    model = clients[0].model_name()
    prompts = [clients[0].chat_ids(problem.question, model) for problem in questions]
    before = _processor_seconds()
    with Progress(console=console) as progress, ThreadPoolExecutor(CONCURRENCY) as pool:
        shown = progress.add_task(f"{QUESTIONS} questions to both, in turns", total=2 * QUESTIONS)
        for pair in range(PAIRS):
            block = prompts[pair * EACH : (pair + 1) * EACH]
            for at in (0, 1) if pair % 2 == 0 else (1, 0):
                began = time.monotonic()
                sides[at].answers += pool.map(partial(clients[at].timed, max_new_tokens=MAX_TOKENS), block)
                sides[at].seconds.append(time.monotonic() - began)
                progress.advance(shown, EACH)
    others, everything = _processor_seconds() - before
    return max(0.0, float(others / everything))


def _processor_seconds() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds that other programs used of all cores, and the seconds that there were."""
    here, cores = psutil.Process(), psutil.cpu_times()
    used = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    own = sum(times.user + times.system for times in used)
    return np.asarray([sum(cores) - cores.idle - cores.iowait - own, sum(cores)])


def _label(launch: Launch) -> str:
    return "eagle3" if launch.draft else "w4a8"


def _log(launch: Launch, folder: Path) -> Path:
    return folder / f"{_label(launch)}-server.log"


def _converse(client: EngineClient, name: str, console: Console) -> list[Generation]:
    """Let the model use a calculator until it answers, and show it: question, thinking, calls, results, answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": FOR_TOOLS}]
    turns: list[Generation] = []
    shown = Text(FOR_TOOLS, style="bold")
    while len(turns) < MAX_TURNS:
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


def _table(plain: Side, fast: Side, found: Sequence[PairedFigure]) -> Table:
    table = Table(title=LOAD, title_style="bold", caption="medians over the pairs, with the 95% interval of the ratio")
    table.add_column("")
    for name in (plain.name, fast.name, "times as good"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(*one.row)
    if accept := fast.acceptance:
        table.add_row("accept length", "-", f"{accept.length:.2f} of 4", "")
        table.add_row("accepted at position 1, 2, 3", "-", ", ".join(f"{p:.0%}" for p in accept.per_position), "")
    return table


def page(plain: Side, fast: Side, same: bool, correct: int, others: float, folder: Path) -> Page:
    """The page of the demo: what is the same, what is faster, and the figures."""
    found = paired_figures(plain, fast)
    title = f"{'PASS' if same else 'FAIL'}: EAGLE3 gives {'the same' if same else 'OTHER'} tokens; {_speed(found)}"
    scope = f"The built-in model on {psutil.cpu_count()} cores, no GPU, {date.today()}."
    verdicts = [Words(f"{correct} of {QUESTIONS} held-out problems solved. {scope}")]
    verdicts += [Words(busy(others), "worse")] if busy(others) else []
    rows = [one.row for one in found]
    if accept := fast.acceptance:
        rows.append(["accept length", "", f"{accept.length:.2f}", ""])
    answers = [(f"answer {n}", a.text) for n, a in enumerate(fast.answers, start=1)]
    columns = ("median over the pairs", plain.name, fast.name, "times as good [95%]")
    sections = [Section("Measured", tables=[report.Table(columns, rows)])]
    sections += [Section("Answers with EAGLE3", listings=answers, closed=True)]
    chart = None
    if find_spec("matplotlib"):
        from kimi_w4a8_lab.report.plots import panel

        bars = [report.Bar(one.title.partition(",")[0], "EAGLE3 against W4A8", False, one.times) for one in found]
        chart = panel("speed", "times as good as without EAGLE3", bars)
    about = f"Demo: the built-in W4A8 model, with and without EAGLE3. {LOAD}, in {folder.name}."
    return Page(title, verdicts, about, chart, sections=sections, tone="better" if same else "worse")


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

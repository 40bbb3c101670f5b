"""`python -m proof.demo`, `make demo`: the whole chain here, with and without speculation, as one table.

The built-in W4A8 checkpoint is served by SGLang twice: without a draft and with EAGLE3. Both hold the same conversation
with a calculator and answer the same questions greedily, which must give the same tokens, and take the same short load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.chat.calculator import declaration, results
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.door.settings import without_keys
from kimi_w4a8_eagle3.engine import startup_check
from kimi_w4a8_eagle3.engine.client import EngineClient, Generation
from kimi_w4a8_eagle3.engine.metrics import Acceptance, acceptance_from_histograms
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port, last_line
from kimi_w4a8_eagle3.fleet.checks import checked
from kimi_w4a8_eagle3.fleet.serve import Terminated, signals_raise
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from kimi_w4a8_lab.accuracy.problems import parse_answer
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.report.page import Page, Section, Words, write_page
from kimi_w4a8_lab.report.page import Table as PageTable
from kimi_w4a8_lab.speed.generator import LoadResult
from kimi_w4a8_lab.speed.measure import measure
from kimi_w4a8_lab.speed.statistics import Interval
from kimi_w4a8_lab.speed.texts import prepare
from kimi_w4a8_lab.speed.workloads import Workload

from .tiny.problems import WordProblem, problems

FOR_TOOLS = "On a farm there are 6 hens and 3 cows. How many legs are there in all?"
QUESTIONS = 20
LOAD_PROMPTS = 16
CONCURRENCY = 2
MAX_TOKENS = 192
MAX_TURNS = 8
FIGURES = (
    ("TTFT median, ms", "median_ttft_ms"),
    ("TPOT median, ms", "median_tpot_ms"),
    ("ITL median, ms", "median_itl_ms"),
    ("output, tok/s", "output_throughput"),
)
_READY_TIMEOUT_S = 240.0
LOAD = Workload(
    name="load",
    summary="short questions, as a conversation asks them",
    dataset="conversations",
    text="problems",
    output_len=MAX_TOKENS,
    concurrency=[CONCURRENCY],
    num_prompts=LOAD_PROMPTS,
    chat_template=True,
    ignore_eos=False,
)


@dataclass(frozen=True)
class ServerResults:
    """Results of one of the two servers."""

    name: str
    ready_s: float
    conversation: list[Generation]
    answers: list[Generation]
    load: LoadResult
    acceptance: Acceptance | None


def demonstrate(runs: Path = DEFAULT_ROOT, console: Console | None = None) -> Path:
    """Run the demo; returns its run directory. Raises KimiError when a server fails or the two texts differ."""
    console = console or table_console()
    folder = new_run_dir("demo", runs)
    console.print(Panel.fit(_intro(folder), title="demo", border_style="cyan"))
    if line := busy(psutil.cpu_percent(0.5)):
        console.print(line, style="yellow", markup=False)
    launches = [_launch(speculate) for speculate in (False, True)]
    launches[0].server(_log(launches[0], folder)).prepare()  # while the checkpoints are examined
    questions = problems("held_out", QUESTIONS)

    with signals_raise(), ExitStack() as engines:
        # Both start at once; whichever is not measured sleeps, and uses no processor time.
        started = [_start(engines, launch, folder, console) for launch in launches]
        ready = [_ready(server, console) for server, _ in started]
        plain, fast = [
            _measure(server, launch, ready_s, questions, folder, console)
            for (server, launch), ready_s in zip(started, ready, strict=True)
        ]

    differences = [
        i for i, (a, b) in enumerate(zip(plain.answers, fast.answers, strict=True)) if a.token_ids != b.token_ids
    ]
    talked = [[turn.token_ids for turn in side.conversation] for side in (plain, fast)]
    correct = sum(parse_answer(a.text) == q.answer for a, q in zip(fast.answers, questions, strict=True))
    console.print(_table(plain, fast))
    console.print(_verdict(differences, talked[0] == talked[1], correct, folder))
    write_json(folder / "result.json", _result(plain, fast, differences, correct))
    same = not differences and talked[0] == talked[1]
    console.print(f"page: {write_page(page(plain, fast, same, correct, folder), folder)}", markup=False)
    console.print("next: .venv/bin/kimi-w4a8 serve tiny   # an OpenAI server with this model", markup=False)
    if differences or talked[0] != talked[1]:
        raise KimiError(
            f"{len(differences)} of {QUESTIONS} greedy answers, or turns with the calculator, differ with speculation",
            where=str(folder / "result.json"),
            expected="the same tokens: speculation changes speed, not answers",
            remedy="`kimi-w4a8 eval lossless` tells a numerical tie from a bug",
        )
    return folder


def busy(percent: float) -> str:
    """Return a warning if other programs use the cores already before the servers start; empty otherwise."""
    if percent < 50:
        return ""
    return f"This machine is busy ({percent:.0f}% of its cores): it may slow one side more, so do not trust the times."


def _launch(speculate: bool) -> Launch:
    """The tiny recipe on a free port; without speculation its draft arguments are switched off."""
    launch = render(load_recipe("tiny" if speculate else "tiny:plain"), [f"port={free_port()}"])
    return replace(launch, env={**launch.env, **without_keys()})


def _start(engines: ExitStack, launch: Launch, folder: Path, console: Console) -> tuple[EngineServer, Launch]:
    """Start one server; `engines` ends it."""
    name = "W4A8 + EAGLE3" if launch.draft else "W4A8"
    launch = checked(launch)
    write_json(folder / f"{_label(launch)}-{RECORD}", record("demo", {launch.name: launch.described()}, launch.env))
    server = launch.server(_log(launch, folder), name)
    with console.status(f"{name}: starting SGLang"):
        engines.enter_context(server)
    engines.callback(server.stop, 0.5)  # no client waits for an answer any more: a graceful end takes 6 s
    return server, launch


def _ready(server: EngineServer, console: Console) -> float:
    """Wait until it answers; the seconds since its start."""
    with console.status(f"{server.name}: starting SGLang") as status:
        began = time.monotonic()

        def show() -> None:
            line = _plain(last_line(server.log_path))
            status.update(f"{server.name}: starting SGLang, {time.monotonic() - began:.0f} s  [dim]{line}[/]")

        seconds = server.wait_ready(_READY_TIMEOUT_S, show)
    console.print(f"[green]✓[/] {server.name}: ready after {seconds:.0f} s")
    return seconds


def _measure(
    server: EngineServer,
    launch: Launch,
    ready_s: float,
    questions: Sequence[WordProblem],
    folder: Path,
    console: Console,
) -> ServerResults:
    name = server.name
    with EngineClient(server.base_url) as client:
        if launch.draft and launch.num_draft_tokens:
            startup_check.require_acceptance(startup_check.ask(client), launch.num_draft_tokens, launch.draft)
        conversation = _converse(client, name, console)
        with _progress(console) as progress, ThreadPoolExecutor(CONCURRENCY) as pool:
            asked = pool.map(lambda problem: client.chat(problem.question, MAX_TOKENS), questions)
            answers = list(
                progress.track(asked, len(questions), description=f"{name}: {len(questions)} greedy answers")
            )
    with console.status(f"{name}: load, {LOAD_PROMPTS} requests at concurrency {CONCURRENCY}"):
        (point,) = LOAD.points()
        measured = replace(Target(server.base_url).connected, name=_label(launch))
        found = measure(measured, point, prepare(LOAD, folder, None, None), folder)
    if found.problems:
        raise KimiError(found.problems[0], where=str(folder / found.raw))
    console.print(f"[green]✓[/] {name}: load finished in {found.load.duration:.0f} s")
    acceptance = found.acceptance
    if launch.num_draft_tokens and acceptance:
        detail = acceptance_from_histograms((a.accepted_histogram for a in answers), launch.num_draft_tokens)
        per_position = detail.per_position if detail else ()
        acceptance = Acceptance(acceptance.length, acceptance.rate, acceptance.steps, per_position)
    return ServerResults(name, ready_s, conversation, answers, found.load, acceptance)


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


def _table(plain: ServerResults, fast: ServerResults) -> Table:
    table = Table(title=f"{LOAD_PROMPTS} requests at concurrency {CONCURRENCY}, greedy", title_style="bold")
    table.add_column("")
    for side in (plain, fast):
        table.add_column(side.name, justify="right")
    table.add_column("times as good", justify="right")
    for title, field in FIGURES:
        a, b = getattr(plain.load, field), getattr(fast.load, field)
        table.add_row(title, f"{a:.1f}", f"{b:.1f}", f"{(b / a if 'throughput' in field else a / b):.2f}x")
    accept = fast.acceptance
    table.add_row("accept length", "-", f"{accept.length:.2f} of 4" if accept else "-", "")
    table.add_row("accept rate", "-", f"{accept.rate:.0%}" if accept else "-", "")
    positions = ", ".join(f"{share:.0%}" for share in accept.per_position) if accept else "-"
    table.add_row("accepted at position 1, 2, 3", "-", positions, "")
    return table


def page(plain: ServerResults, fast: ServerResults, same: bool, correct: int, folder: Path) -> Page:
    """The page of the demo: what is the same, what is faster, and the figures."""
    times = plain.load.median_tpot_ms / fast.load.median_tpot_ms
    speed = f"{times:.2f}x {'faster' if times > 1 else 'as fast'} (TPOT)"
    title = f"{'PASS' if same else 'FAIL'}: EAGLE3 gives {'the same' if same else 'OTHER'} tokens and is {speed}"
    verdicts = [Words(f"{correct} of {QUESTIONS} held-out problems solved.")]
    rows = [[title, *(f"{getattr(s.load, field):.1f}" for s in (plain, fast))] for title, field in FIGURES]
    accept = fast.acceptance
    rows.append(["accept length", "", f"{accept.length:.2f}" if accept else ""])
    answers = [(f"answer {n}", a.text) for n, a in enumerate(fast.answers, start=1)]
    sections = [
        Section("Measured", tables=[PageTable(("figure", plain.name, fast.name), rows)]),
        Section("Answers with EAGLE3", listings=answers, closed=True),
    ]
    chart = None
    if find_spec("matplotlib"):
        from kimi_w4a8_lab.report.page import Bar
        from kimi_w4a8_lab.report.plots import panel

        values = [(s.name, Interval(s.load.median_tpot_ms, None, None)) for s in (plain, fast)]
        chart = panel("tpot", "TPOT median (ms)", [Bar("load", name, False, value) for name, value in values])
    load = f"{LOAD_PROMPTS} requests at concurrency {CONCURRENCY} on this machine, in {folder.name}."
    about = f"Demo: the built-in W4A8 model, with and without EAGLE3. {load}"
    return Page(title, verdicts, about, chart, sections=sections, tone="better" if same else "worse")


def _verdict(differences: list[int], same_talk: bool, correct: int, folder: Path) -> Panel:
    same = same_talk and not differences
    turns = "all turns" if same_talk else "not all turns"
    lines = [
        f"{'[green]✓' if same else '[red]✗'} {QUESTIONS - len(differences)} of {QUESTIONS} greedy answers and {turns} "
        "with the calculator have the same tokens with and without EAGLE3[/]",
        f"{correct} of {QUESTIONS} held-out problems solved",
        f"Everything is in {folder}",
    ]
    return Panel.fit("\n".join(lines), border_style="green" if same else "red")


def _result(plain: ServerResults, fast: ServerResults, differences: list[int], correct: int) -> dict[str, object]:
    def side(s: ServerResults) -> dict[str, object]:
        return {
            "ready_s": s.ready_s,
            "load": s.load.model_dump(),
            "acceptance": asdict(s.acceptance) if s.acceptance else None,
            "conversation": [asdict(turn) for turn in s.conversation],
            "answers": [asdict(answer) for answer in s.answers],
        }

    return {
        "kind": "demo",
        "w4a8": side(plain),
        "eagle3": side(fast),
        "questions": QUESTIONS,
        "different_answers": differences,
        "solved": correct,
    }


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _intro(folder: Path) -> str:
    return (
        "A small Kimi-K2.5-shaped model, quantized to W4A8 by AMD Quark, served by SGLang on this machine:\n"
        "once without speculation, once with EAGLE3 (3 steps, topk 1, 4 draft tokens).\n"
        f"Logs and results: {folder}"
    )


def _plain(line: str) -> str:
    """A log line that rich shows as it is, cut to the terminal."""
    return line.replace("[", "(").replace("]", ")")[:90]


def main(runs: Path = typer.Option(DEFAULT_ROOT, "--runs", help="Where the run directory is created.")) -> None:
    """Serve the built-in model with and without EAGLE3, compare texts and speed (about a minute on 2 cores)."""
    try:
        demonstrate(runs)
    except Terminated as stopped:
        typer.echo(f"\nkimi-w4a8: {stopped} received; the servers were stopped", err=True)
        raise typer.Exit(stopped.exit_code) from None


if __name__ == "__main__":
    run(lambda: typer.run(main))

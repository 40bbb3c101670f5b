"""`python -m proof.scale_demo`: two replicas behind SGLang's router here, under load; one is killed, both are renewed.

Every answer is compared with what it must be, so the summary says what clients saw and not only how fast it was.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import typer
from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.base.signals import Terminated, signals_raise
from kimi_w4a8_eagle3.cli import run

from .load.load import Load, Summary, forbidden, summarize, write_records
from .load.load_questions import known_questions
from .load.load_request import Outcome, Record
from .load.served import Event, Leftovers, ServedFleet

CONCURRENCY = 6
PAUSE_S = 0.5  # of a client between two requests: two cores must start an engine beside the load
QUESTIONS = 24
_STEADY_S = 10.0
_SETTLE_S = 6.0
_RECOVERY_TIMEOUT_S = 400.0
_REFRESH_S = 0.25
_ANSWERED = "smg_worker_cb_outcomes_total"


@dataclass(frozen=True)
class Phase:
    """A part of the demo between two Unix times."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Result:
    """What the demo measured. share: answers of each replica by the router's count, 0 to 1."""

    phases: Sequence[tuple[Phase, Summary]]
    detected_s: float
    whole_s: float
    rolling_s: float
    share: Mapping[str, float]
    wrong: int
    left: Leftovers

    @property
    def good(self) -> bool:
        """No wrong or silently shortened answer, nothing lost in the rolling restart, nothing left behind."""
        rolling = next(summary for phase, summary in self.phases if phase.name == "rolling restart")
        return not self.wrong and not self.left and set(rolling.outcomes) <= {Outcome.OK.value}


def demonstrate(runs: Path = DEFAULT_ROOT, console: Console | None = None) -> Path:
    """Run the demo; returns its run directory. Raises KimiError when an answer was wrong or a request was lost."""
    console = console or table_console()
    folder = new_run_dir("scale-demo", runs)
    console.print(Panel.fit(_intro(folder), title="two replicas", border_style="cyan"))
    write_json(folder / RECORD, record("scale-demo", {}, {}, concurrency=CONCURRENCY))
    with signals_raise(), ServedFleet(folder) as fleet:
        with console.status("two replicas of the built-in model start") as status:
            began = time.time()
            ready = fleet.wait_whole(on_wait=lambda s: status.update(f"two replicas and the router start, {s:.0f} s"))
        console.print(
            f"[green]✓[/] two replicas ready and registered after {ready - began:.0f} s at {fleet.base_url}/v1"
        )
        with console.status(f"{QUESTIONS} reference answers"):
            questions = known_questions(fleet.base_url, QUESTIONS)
        load = Load(fleet.base_url, questions, CONCURRENCY, pause_s=PAUSE_S)
        with load:
            phases, detected_s, whole_s, rolling_s = _break_things(fleet, load, console)
        share = _share(fleet)
        fleet.stop(signal.SIGTERM)
        left = fleet.leftovers()
    records = load.records
    summaries = [(phase, summarize(records, phase.began, phase.ended)) for phase in phases]
    result = Result(summaries, detected_s, whole_s, rolling_s, share, len(forbidden(records)), left)
    _write(folder, result, records)
    console.print(_table(result))
    console.print(_verdict(result, folder))
    if not result.good:
        raise KimiError(
            f"{result.wrong} wrong or shortened answers; left behind: {left}",
            where=str(folder / "requests.jsonl"),
            expected="only whole answers and errors that the client sees, and none of them in the rolling restart",
        )
    return folder


def _break_things(fleet: ServedFleet, load: Load, console: Console) -> tuple[list[Phase], float, float, float]:
    """The phases; seconds until the killed replica was missed, until it was back, and of the rolling restart."""
    phases: list[Phase] = []

    @contextmanager
    def phase(name: str) -> Iterator[Status]:
        began = time.time()
        with console.status(name) as status:
            yield status
        phases.append(Phase(name, began, time.time()))

    def show(status: Status, name: str, seconds: float) -> None:
        now = time.time()
        recent = summarize(load.records, now - 5.0, now).tokens_per_s
        counts = ", ".join(f"{number} {outcome.value}" for outcome, number in sorted(load.outcomes().items()))
        status.update(f"{name}, {seconds:.0f} s: {recent:.0f} tok/s; {counts}")

    def steady(name: str, seconds: float) -> None:
        with phase(name) as status:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                show(status, name, seconds - left)
                time.sleep(_REFRESH_S)

    steady("before", _STEADY_S)
    console.print(f"[green]✓[/] load: {CONCURRENCY} clients")
    with phase("replica killed") as status:
        killed = time.time()
        fleet.engine(0).kill()
        down = fleet.wait_event(lambda e: e.event in ("down", "removed"), killed, _RECOVERY_TIMEOUT_S)
        console.print(f"[red]✗[/] kill -9 of replica-0, noticed after {down.time - killed:.1f} s")
        whole = fleet.wait_whole(_RECOVERY_TIMEOUT_S, lambda s: show(status, "replica-0 starts again", s), killed)
    console.print(f"[green]✓[/] replica-0 is back and registered {whole - killed:.0f} s after the kill")
    steady("whole again", _SETTLE_S)
    with phase("rolling restart") as status:
        asked = time.time()
        fleet.process.send_signal(signal.SIGHUP)
        done = fleet.wait_event(_rolled, asked, 2 * _RECOVERY_TIMEOUT_S, lambda s: show(status, "rolling restart", s))
        if not done.reason.startswith("done"):
            raise KimiError(f"the rolling restart ended early: {done.reason}", where=str(fleet.run))
    console.print(f"[green]✓[/] both replicas restarted, one after the other, in {done.time - asked:.0f} s")
    steady("after", _SETTLE_S)
    return phases, down.time - killed, whole - killed, done.time - asked


def _rolled(event: Event) -> bool:
    return event.event == "rolling-restart" and event.reason.startswith(("done", "given up"))


def _share(fleet: ServedFleet) -> dict[str, float]:
    """Share of the requests that the router gave to each replica; it counts them by the replica's address."""
    answered = Reading.parse(httpx.get(f"{fleet.ops_url}/metrics", timeout=10.0).text).by(_ANSWERED, "worker")
    counts = {f"replica-{entry['name']}": answered.get(entry["base_url"], 0.0) for entry in fleet.status()["replicas"]}
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else {}


def _write(folder: Path, result: Result, records: Sequence[Record]) -> None:
    write_records(folder / "requests.jsonl", records)
    phases = [{**asdict(phase), **asdict(summary)} for phase, summary in result.phases]
    figures = {"phases": phases, "detected_s": result.detected_s, "whole_s": result.whole_s}
    figures |= {"rolling_restart_s": result.rolling_s, "share": dict(result.share), "wrong": result.wrong}
    write_json(folder / "result.json", figures | {"left_behind": str(result.left)})


def _table(result: Result) -> Table:
    table = Table(title=f"{CONCURRENCY} clients, greedy, every answer compared", title_style="bold")
    table.add_column("")
    for phase, _ in result.phases:
        table.add_column(phase.name, justify="right")
    summaries = [summary for _, summary in result.phases]
    table.add_row("seconds", *(f"{phase.ended - phase.began:.0f}" for phase, _ in result.phases))
    for outcome in Outcome:
        if any(outcome.value in summary.outcomes for summary in summaries):
            table.add_row(f"requests {outcome.value}", *(str(s.outcomes.get(outcome.value, 0)) for s in summaries))
    table.add_row("output, tok/s", *(f"{summary.tokens_per_s:.0f}" for summary in summaries))
    table.add_row("TTFT median, ms", *(_ms(summary.ttft_ms) for summary in summaries))
    table.add_row("TPOT median, ms", *(_ms(summary.tpot_ms) for summary in summaries))
    return table


def _verdict(result: Result, folder: Path) -> Panel:
    mark = "[green]✓" if result.good else "[red]✗"
    total = sum(summary.requests for _, summary in result.phases)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.share.items())
    lines = [
        f"{mark} {result.wrong} of {total} answers wrong or silently shortened; left behind: {result.left}[/]",
        f"kill -9 of a replica: noticed after {result.detected_s:.1f} s, replaced after {result.whole_s:.0f} s",
        f"rolling restart of both: {result.rolling_s:.0f} s",
        f"share of the requests by the router's count: {shares or 'not reported'}",
        f"Everything is in {folder}",
    ]
    return Panel.fit("\n".join(lines), border_style="green" if result.good else "red")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _intro(folder: Path) -> str:
    return (
        f"Two replicas of the built-in model behind SGLang's router on this machine, and {CONCURRENCY} clients.\n"
        "One replica is killed and comes back; then both are restarted without losing a request.\n"
        f"Logs and results: {folder}"
    )


def main(runs: Path = typer.Option(DEFAULT_ROOT, "--runs", help="Where the run directory is created.")) -> None:
    """Two replicas behind SGLang's router under load: kill one, restart both (about 4 minutes on 2 cores)."""
    try:
        demonstrate(runs)
    except Terminated as stopped:
        typer.echo(f"\nkimi-w4a8: {stopped} received; the replicas and the router were stopped", err=True)
        raise typer.Exit(stopped.exit_code) from None


if __name__ == "__main__":
    run(lambda: typer.run(main))

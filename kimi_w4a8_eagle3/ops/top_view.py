"""The tables of `kimi top`: a column for each replica, as many beside each other as the terminal is wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from .overview import Latency, ReplicaRow, RouterRow

_LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = {"ready": "green", "starting": "cyan", "checking": "cyan", "draining": "yellow"}
_NAME_WIDTH, _COLUMN_WIDTH = 24, 22
SPARKS = _COLUMN_WIDTH - 2  # intervals in the picture of the throughput
_BAR_WIDTH = 8
_LEGEND = (
    "Latencies are interpolated in the server's histogram buckets: none is finer than 100 ms for TTFT. "
    "An accept length in brackets is the canary's."
)


class Overview:
    """The whole screen. throughput: output tokens/s of the last intervals by replica. notes: one line each."""

    def __init__(
        self,
        title: str,
        rows: Sequence[ReplicaRow],
        router: RouterRow | None,
        throughput: Mapping[str, Sequence[float]],
        notes: Sequence[str] = (),
    ) -> None:
        self._title, self._rows, self._router = title, rows, router
        self._throughput, self._notes = throughput, notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._title, style="bold")
        side_by_side = max((options.max_width - _NAME_WIDTH) // _COLUMN_WIDTH, 1)
        for start in range(0, len(self._rows), side_by_side):
            yield self._table(self._rows[start : start + side_by_side])
        if self._router is not None:
            yield _router_line(self._router)
        for note in self._notes:
            yield Text(note, style="yellow")
        yield Text(_LEGEND, style="dim")

    def _table(self, rows: Sequence[ReplicaRow]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("replica", width=_NAME_WIDTH - 2)
        for row in rows:
            table.add_column(row.name or "-", width=_COLUMN_WIDTH - 2, justify="right", no_wrap=True)
        columns = [dict(_cells(row, self._throughput.get(row.name, ()))) for row in rows]
        for name in columns[0]:
            table.add_row(name, *(column[name] for column in columns))
        return table


def sparkline(values: Sequence[float]) -> str:
    """Values as bars between zero and the largest; empty for none."""
    top = max(values, default=0.0)
    if top <= 0:
        return _LEVELS[0] * len(values)
    return "".join(_LEVELS[round(value / top * (len(_LEVELS) - 1))] for value in values)


def _cells(row: ReplicaRow, throughput: Sequence[float]) -> Iterator[tuple[str, str | Text]]:
    yield "phase", Text(row.phase or "-", style=_STYLES.get(row.phase, "bold red" if row.phase else ""))
    yield "running / queued", f"{_number(row.running)} / {_number(row.queued)}"
    yield "KV pool in use", _kv(row.kv_used)
    yield "output tok/s", _number(row.tokens_out)
    yield "", sparkline(list(throughput)[-SPARKS:])
    yield "input tok/s", _number(row.tokens_in)
    yield "TTFT P50 / P99, ms", _latency(row.ttft)
    yield "TPOT P50 / P99, ms", _latency(row.tpot)
    yield "accept length", _accept_length(row)
    yield "accepted at 1 / 2 / 3", _shares(row.accept_rates)
    yield "KV head-room, tokens", _number(row.headroom)
    yield "MoE backend", ", ".join(row.moe_backends) or "-"
    yield (
        "restarts / stalls",
        Text(f"{_number(row.restarts)} / {_number(row.stalls)}", style="bold red" if row.stalls else ""),
    )


def _router_line(router: RouterRow) -> Text:
    text = Text(f"router: {router.requests:.1f} requests/s, ")
    text.append(f"{router.server_errors:.2f} errors/s (5xx)", style="bold red" if router.server_errors else "")
    text.append(f", {router.client_errors:.2f} refused/s (4xx), ")
    all_healthy = router.workers > 0 and router.healthy >= router.workers
    text.append(
        f"{router.healthy:.0f} of {router.workers:.0f} workers healthy", style="" if all_healthy else "bold red"
    )
    return text


def _kv(share: float | None) -> str | Text:
    if share is None:
        return "-"
    filled = round(min(share, 1.0) * _BAR_WIDTH)
    style = "red" if share > 0.95 else "yellow" if share > 0.85 else "green"
    bar = Text("━" * filled, style=style).append("╌" * (_BAR_WIDTH - filled), style="dim")
    return bar.append(f" {100 * share:5.1f} %", style="default")


def _accept_length(row: ReplicaRow) -> str:
    if row.accept_length is not None:
        return f"{row.accept_length:.2f}"
    return "-" if row.canary_length is None else f"({row.canary_length:.2f})"


def _shares(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %" if shares else "-"


def _latency(latency: Latency | None) -> str:
    if latency is None:
        return "-"
    digits = 0 if latency.p99 >= 0.1 else 1
    return f"{1000 * latency.p50:,.{digits}f} / {1000 * latency.p99:,.{digits}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

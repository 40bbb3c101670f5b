"""The picture of a soak: what was served, and everything that could leak, over the same minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from kimi_w4a8_eagle3.report.plots import COLOURS, STYLE, plt

from ..load.load import throughput
from ..load.load_request import Record
from .findings import MIB
from .processes import Held
from .soak import Soak
from .watch import RUNNING, USED, WAITING

_STEP_S = 15.0
_DPI = 90


def draw(found: Soak, path: Path, title: str) -> None:
    """Write the picture, a PNG."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 2, figsize=(12, 9.5), sharex=True)
        (tokens, outcomes), (memory, descriptors), (slots, queue) = axes
        _throughput(tokens, found)
        _outcomes(outcomes, found)
        _held(memory, found, "memory (USS) since before the load, MiB", lambda now, first: (now.uss - first.uss) / MIB)
        _held(descriptors, found, "open descriptors (colours are those of memory, too)", lambda now, _: float(now.fds))
        descriptors.set_ylim(bottom=0, top=1.35 * descriptors.get_ylim()[1])
        descriptors.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
        _engines(slots, found, "KV slots in use", (USED,))
        _engines(queue, found, "requests", (RUNNING, WAITING))
        for axis in axes.flat:
            axis.axvspan(0, (found.ended - found.began) / 60, color="#f2f2f2", zorder=0)
            axis.grid(axis="y", color="#e4e4e4", linewidth=0.6)
        for axis in axes[-1]:
            axis.set_xlabel("minutes since the load began (grey: load)")
        figure.suptitle(title)
        figure.savefig(path, dpi=_DPI)
        plt.close(figure)


def _throughput(axis: Axes, found: Soak) -> None:
    steps = throughput(found.records, found.began, found.ended, _STEP_S)
    axis.plot([at / 60 for at, _ in steps], [rate for _, rate in steps], color=COLOURS[0])
    axis.set_title("tokens received a second", loc="left")
    axis.set_ylim(bottom=0)


def _outcomes(axis: Axes, found: Soak) -> None:
    """Requests that have ended, by outcome, added up."""
    minutes = [step * _STEP_S / 60 for step in range(int((found.samples[-1].at - found.began) / _STEP_S) + 1)]
    for colour, name in zip(COLOURS * 2, _by_frequency(found.records), strict=False):
        ended = [(record.ended - found.began) / 60 for record in found.records if _label(record) == name]
        axis.plot(minutes, [sum(at <= minute for at in ended) for minute in minutes], label=name, color=colour)
    axis.set_title("requests ended", loc="left")
    axis.legend(frameon=False, fontsize=8)


def _held(axis: Axes, found: Soak, title: str, value: Callable[[Held, Held], float]) -> None:
    """One line for each process; a kind of process has one colour, its later replicas are dashed.

    value: of what a process holds now and what it held before the load.
    """
    kinds: dict[str, str] = {}
    for name, first in found.before.held.items():
        later = _kind(name) in kinds
        colour = kinds.setdefault(_kind(name), COLOURS[len(kinds) % len(COLOURS)])
        points = [(_minute(found, s.at), value(s.held[name], first)) for s in found.samples if name in s.held]
        axis.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle="--" if later else "-",
            label=None if later else _kind(name),
        )
    axis.set_title(title, loc="left")


def _engines(axis: Axes, found: Soak, title: str, keys: Sequence[str]) -> None:
    shown = {USED: "", RUNNING: " running", WAITING: " waiting"}
    for number, name in enumerate(found.before.engines):
        for style, key in zip(("-", ":"), keys, strict=False):
            points = [(_minute(found, s.at), s.engines[name][key]) for s in found.samples if name in s.engines]
            axis.plot(*zip(*points, strict=True), style, color=COLOURS[number], label=name + shown[key])
    axis.set_title(title, loc="left")
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _minute(found: Soak, at: float) -> float:
    return (at - found.began) / 60


def _kind(process: str) -> str:
    """The scheduler of replica 0 and that of replica 1 are of one kind."""
    return process.partition(" ")[2] if process.startswith("replica-") else process


def _label(record: Record) -> str:
    status = record.outcome.value == "refused" and record.status
    return f"{record.outcome.value} ({status})" if status else record.outcome.value


def _by_frequency(records: Sequence[Record]) -> list[str]:
    return [name for name, _ in Counter(map(_label, records)).most_common()]

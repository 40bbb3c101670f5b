"""The report: one page without outside files, from runs of this machine or another; and the A/B order."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.every_page import Copies, Shown
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.report import measured
from kimi_w4a8_lab.report.analysis import Analysis
from kimi_w4a8_lab.report.measured import page, verdicts
from kimi_w4a8_lab.report.page import write_page
from kimi_w4a8_lab.report.tables import conclude
from kimi_w4a8_lab.speed.bench import Plan
from kimi_w4a8_lab.speed.runs import Run, read_run
from kimi_w4a8_lab.speed.statistics import Interval
from kimi_w4a8_lab.speed.workloads import load_workload

PANELS = ("tpot_median_ms", "output_throughput_tok_s", "tpot_p99_ms", "itl_median_ms", "ttft_median_ms")


def test_the_page_stands_alone(copies: Copies, tmp_path: Path) -> None:
    runs = [copies("a", "w4a8", 3.0, 2, acceptance=None), copies("b", "eagle3", 1.0, 2)]
    html = write_page(page(Analysis(runs)), tmp_path / "out" / "named.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:image/svg\+xml;base64,)", html)
    for text in ("TPOT P99", "break-even", "repeats itself", "eagle3 over w4a8", "MTBench", "color-adjust: exact"):
        assert text in html, text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"named.html", "accept_length.svg", "speedup.svg", *(f"{key}.svg" for key in PANELS)}
    assert html.count("data:image/svg+xml;base64,") == len(names) - 1


def test_the_page_opens_with_the_verdict_and_one_chart(copies: Copies, tmp_path: Path) -> None:
    runs = [copies("a", "tiny:plain", 3.0, 2, acceptance=None), copies("b", "tiny", 1.0, 2)]
    analysis = Analysis(runs)
    (row,) = [row for row in analysis.changes if row.metric.key == "tpot_median_ms"]
    analysis.changes[:] = [replace(row, change=Interval(1 / 3, 0.3, 0.4))]
    (faster,) = verdicts(analysis)
    assert faster.text.startswith("EAGLE3 is 3.00x [2.50, 3.33] as fast on tiny-con2 at concurrency 2")
    assert faster.tone == "better"
    html = write_page(page(analysis), tmp_path / "out").read_text()
    order = [html.index(text) for text in ("EAGLE3 is 3.00x", "<img", "Measured, published", "Other figures")]
    assert order == sorted(order) and "3.00x [2.50, 3.33]" in html[order[2] : order[3]]
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', html)
    assert len(alts) == 7 and all(alts) and "tiny:plain" in alts[0] and "TPOT median (ms)" in alts[0]


def test_a_side_alone_is_shown_beside_published_and_predicted_figures(copies: Copies) -> None:
    workload = load_workload("con40")
    run = copies("a", "eagle3", workload=workload, concurrency=40)
    html = page(Analysis([run]))
    assert html.title.startswith("eagle3 on con40 at concurrency 40: TPOT ") and "not comparable" in html.title
    table = html.sections[0].tables[0].filled()
    assert table.columns == ["figure", "side", "measured [95%]", "predicted", "published", "meaning"]
    tpot = {name: cell.text for name, cell in zip(table.columns, table.rows[0], strict=True)}  # type: ignore[union-attr]
    run.record["targets"] = {"eagle3": {"settings": ["tp-size=4"]}}  # the model knows no engine of 4 GPUs
    other = page(Analysis([run])).sections[0].tables[0].filled()
    assert "published" in other.columns and "predicted" not in other.columns
    assert tpot["figure"] == "TPOT median" and tpot["published"] == "27.79 ms" and tpot["predicted"].endswith(" ms")


def test_a_run_read_elsewhere_without_its_raw_files_still_reports(copies: Copies, tmp_path: Path) -> None:
    run = copies("a", "w4a8")
    for path in run.folder.glob("*.jsonl"):
        path.unlink()
    assert write_page(page(Analysis([read_run(run.folder)])), tmp_path / "out").is_file()


def test_marked_measurements_are_named_and_nothing_to_show_is_an_error(
    copies: Copies, failed_run: tuple[Run, KimiError], tmp_path: Path
) -> None:
    html = write_page(page(Analysis([copies("a", "w4a8"), failed_run[0]])), tmp_path / "out").read_text()
    assert "2 of 6 requests failed" in html
    with pytest.raises(KimiError, match="none of the runs"):
        write_page(page(Analysis([failed_run[0]])), tmp_path / "out")


def test_a_page_in_a_run_is_never_recommended(copies: Copies) -> None:
    """A stranger's folder brings any page; a run is shown from its figures or not at all."""
    run = copies("a", "w4a8")
    (run.folder / "result.json").write_text('{"kind": "demo"}')
    (run.folder / "report.html").write_text("<script>alert(1)</script>")
    with pytest.raises(KimiError, match="Input tag 'demo' found") as caught:
        CliRunner().invoke(app, ["report", str(run.folder)], catch_exceptions=False)
    assert "report.html" not in str(caught.value) and "run it again" in caught.value.remedy


def test_the_text_of_a_strangers_run_does_not_act_on_a_terminal(copies: Copies) -> None:
    run = copies("a", "w\x1b]0;owned\x07\u202e\u009b2J")
    run.record["command"] = ["\x1b[2J"]
    run.note()
    shown = CliRunner().invoke(app, ["report", str(run.folder)]).output
    shown += CliRunner().invoke(app, ["bench", "compare", str(run.folder), str(copies("b", "tiny").folder)]).output
    shown += (run.folder / "report" / "report.html").read_text()
    assert "w?]0;owned???2J" in shown and not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def plan(repeats: int, rounds: int) -> Plan:
    return Plan((Target(recipe="tiny:plain"), Target(recipe="tiny")), [load_workload("tiny-con2")], repeats, rounds)


@pytest.mark.parametrize(
    ("repeats", "rounds", "order"),
    [
        (4, 2, [("tiny:plain", [0, 2]), ("tiny", [0, 2, 1, 3]), ("tiny:plain", [1, 3])]),
        (2, 1, [("tiny:plain", [0, 1]), ("tiny", [0, 1])]),
        (3, 3, [("tiny:plain", [0]), ("tiny", [0, 1]), ("tiny:plain", [1, 2]), ("tiny", [2])]),
    ],
)
def test_sides_take_turns_and_both_measure_every_repetition(
    repeats: int, rounds: int, order: list[tuple[str, list[int]]]
) -> None:
    assert [(side.name, numbers) for side, numbers in plan(repeats, rounds).blocks()] == order


def test_bad_plans_are_refused() -> None:
    with pytest.raises(KimiError, match="1 repetition"):
        plan(1, 2)
    with pytest.raises(KimiError, match="two sides have the name tiny"):
        Plan((Target(recipe="tiny"), Target(recipe="tiny")), [], 1, 1)


def test_a_comparison_ends_with_its_verdict_and_three_lines(copies: Copies, tmp_path: Path) -> None:
    runs = [copies("a", "agent:plain", 3.0, 4, acceptance=None), copies("b", "agent", 1.0, 4)]
    analysis, screen = Analysis(runs), Console(file=io.StringIO(), width=80)
    changes = {"tpot_median_ms": (0.5, 0.4, 0.6), "ttft_median_ms": (301 / 259, 1.1, 1.3)}
    for at, row in enumerate(analysis.changes):
        if row.metric.key == "ttft_median_ms":
            row = replace(row, value_a=Interval(259, None, None), value_b=Interval(301, None, None))
        change = Interval(*changes.get(row.metric.key, (1.02, 0.97, 1.06)))
        analysis.changes[at] = replace(row, change=change)
    conclude(page(analysis), tmp_path, screen)
    *before, tpot, ttft, rate, path = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(before) < 16 and before[-1].startswith("╰") and path.startswith("page: ")
    assert tpot.startswith("tiny-con2 c=2: TPOT median ") and tpot.endswith(" ms, 2.00x [1.67, 2.50] as good")
    assert ttft == "tiny-con2 c=2: TTFT median 259.0 to 301.0 ms, 0.86x [0.77, 0.91] as good"
    assert rate.startswith("tiny-con2 c=2: output throughput ") and rate.endswith(" tok/s, no difference shown")
    [table] = measured.figure_tables(analysis, ["output_throughput_tok_s"])
    assert table.rows[1][-1].text == "no difference shown to agent:plain (1.02x [0.97, 1.06])"  # type: ignore[union-attr]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("words", ["ab --a tiny:plain --b tiny --rounds 1", "sweep --recipe tiny"])
def test_a_comparison_of_engines_ends_in_a_page_of_its_result(words: str, tmp_path: Path) -> None:
    load = ["-w", "tiny-con2", "-n", "4", "--repeats", "2", "--set", f"port={free_port()}"]
    shown = Shown.of(tmp_path, "kimi_w4a8_eagle3", "bench", *words.split(), *load)
    assert shown.headline.startswith("EAGLE3") and " on tiny-con2 at concurrency 2 (TPOT " in shown.headline
    for side in ("tiny:plain", "tiny"):
        rates = [one["load"]["output_throughput"] for one in shown.stored["measurements"] if one["side"] == side]
        measured = float(shown.rows["output throughput", side][2].partition(" ")[0])
        assert len(rates) == 2 and measured == pytest.approx(sum(rates) / 2, rel=1e-3)

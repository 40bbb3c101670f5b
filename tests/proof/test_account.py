"""`python -m proof.account`: parts that sum to published figures, and the time model of a MoE layer."""

from __future__ import annotations

import json

import pytest

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.predict.machine_model import Cluster, kimi
from kimi_w4a8_eagle3.predict.predict import Load, calibrate
from proof.account import moe_time
from proof.account.__main__ import main
from proof.account.parts import Account, Part, explain, published_rereads

CLUSTER = Cluster()
PUBLISHED = [  # milliseconds of a step: TPOT or ITL times accept length, less other requests' prefills at concurrency 2
    (Load(2), 16.94 - 640 / 1.5 / 2 / 511 * 1),
    (Load(40), 27.98),
    (Load(2, steps=3, accept_length=3.97), (5.4 - 640 / 1.5 / 2 / 511) * 3.97),
    (Load(40, steps=3, accept_length=3.93), 11.75 * 3.93),
]


def account(load: Load) -> Account:
    return explain(load, calibrate(CLUSTER), CLUSTER)


@pytest.mark.parametrize(("load", "step_ms"), PUBLISHED)
def test_the_parts_sum_to_the_published_step_and_little_is_unexplained(load: Load, step_ms: float) -> None:
    found = account(load)
    assert found.step_ms == pytest.approx(step_ms)
    for rows, total in ((found.step, found.step_ms), (found.prefill, found.prefill_ms)):
        assert sum(row.ms for row in rows) == pytest.approx(total)
        assert [row.name for row in rows].count("unexplained") == 1 and rows[-1].name == "unexplained"
    assert abs(found.step[-1].ms) < 0.15 * step_ms  # of a prefill a third is
    assert any(row.part is Part.KV_AGAIN for row in found.step) == (load.steps > 0)


def test_an_unpublished_load_is_held_against_the_fitted_model() -> None:
    found = account(Load(16, steps=3, accept_length=2.7))
    assert "no published figures" in found.source and found.step_ms > account(Load(2)).step_ms


def test_levers_are_in_order_and_none_saves_what_is_not_there() -> None:
    found = account(PUBLISHED[3][0])
    assert 0 < published_rereads(CLUSTER, kimi()) < 3
    *alone, together, fixed = found.levers
    rates = [lever.throughput_tok_s for lever in alone]
    assert rates == sorted(rates, reverse=True) and together.throughput_tok_s > max(rates)
    by_name = {lever.name: lever.step_ms for lever in alone}
    assert by_name["a verify reads KV once"] == pytest.approx(
        sum(row.ms for row in found.step if row.part is Part.KV_AGAIN)
    )
    kv = sum(row.ms for row in found.step if row.part in (Part.KV_ONCE, Part.KV_AGAIN))
    assert by_name["FP8 KV cache"] == pytest.approx(kv / 2)
    once = kv - by_name["a verify reads KV once"]
    others = sum(ms for name, ms in by_name.items() if "KV" not in name and "sampled" not in name)
    assert together.step_ms == pytest.approx(others + kv - once / 2)
    reduces, experts = (
        sum(row.ms for row in found.prefill if row.part is part) for part in (Part.REDUCES, Part.EXPERTS)
    )
    assert 3 * reduces < -fixed.prefill_ms < 3 * reduces + 10 * experts and fixed.step_ms == 0  # ten chunks of 1,024
    assert "options.deterministic" in fixed.name and fixed.throughput_tok_s < min(rates)


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(2, None, 3, 10240, 512, as_json=False)
    shown = capsys.readouterr().out
    assert "unexplained" in shown and "tok/s" in shown
    main(2, None, 3, 10240, 512, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["load"]["accept_length"] == 3.97 and found["now"]["tpot_ms"] == pytest.approx(5.4)


@pytest.mark.parametrize(
    ("tokens", "launches", "most_us"),
    [(2, 2, 36), (8, 2, 62), (40, 3, 170), (160, 4, 280), (257, 4, 290), (10240, 16, 720)],
)
def test_launches_and_time_of_a_layer(tokens: int, launches: int, most_us: float) -> None:
    """What the kernels were built to reach, by the model, and for large batches what they have."""
    parts = moe_time.ours(CLUSTER.gpu, MoeShape(384, 7168, 256, 8), tokens)
    assert sum(part.launches for part in parts) == launches and sum(part.us for part in parts) <= most_us

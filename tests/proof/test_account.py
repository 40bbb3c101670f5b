"""`python -m proof.account`: parts that sum to published figures, levers that a server accepts, and the time model."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.recipe.memory_plan import ModelCard, draft_weights
from kimi_w4a8_lab.predict.layouts import node_layouts
from kimi_w4a8_lab.predict.machine_model import Cluster, draft_bytes, kimi
from kimi_w4a8_lab.predict.predict import Load, calibrate, fit_points, published_points
from proof.account import calibration, layouts, levers, moe_time, plans, points, prefill, shares
from proof.account.__main__ import main
from proof.account.parts import Account, decode_attention, explain

CLUSTER, LAYOUTS = Cluster(), node_layouts()
DOCS = Path(__file__).parents[2] / "docs"
KIMI = MoeShape(384, 7168, 256, 8)
PUBLISHED = [  # ms of a step: TPOT x accept length less others' prefills, or ITL x tokens of the median's chunk
    (Load(2), 16.94 - 640 / 1.5 / 2 / 511 * 1),
    (Load(40), 27.98),
    (Load(2, steps=3, accept_length=3.97), (5.4 - 640 / 1.5 / 2 / 511) * 3.97),
    (Load(40, steps=3, accept_length=3.93), 11.75 * 4),
]


def account(load: Load) -> Account:
    return explain(load, calibrate(CLUSTER), CLUSTER)


def changes(load: Load) -> list[levers.Lever]:
    return levers.levers(account(load), calibrate(CLUSTER), CLUSTER)


@pytest.mark.parametrize(("load", "step_ms"), PUBLISHED)
def test_the_parts_sum_to_the_published_step_and_little_is_unexplained(load: Load, step_ms: float) -> None:
    found = account(load)
    assert found.step_ms == pytest.approx(step_ms)
    for rows, total in ((found.step, found.step_ms), (found.prefill, found.prefill_ms)):
        assert sum(row.ms for row in rows) == pytest.approx(total)
        assert [row.name for row in rows].count("unexplained") == 1 and rows[-1].name == "unexplained"
        assert abs(rows[-1].ms) < 0.15 * total


def test_an_unpublished_load_is_held_against_the_fitted_model() -> None:
    found = account(Load(16, steps=3, accept_length=2.7))
    assert "no published figures" in found.source and found.step_ms > account(Load(2)).step_ms


def test_attention_reads_once_and_multiplies_for_every_verified_token() -> None:
    plain, verify = (load for load, _ in PUBLISHED[1::2])
    kv, shapes = 40 * 10496 * 61 * 576 * 2, kimi()
    read = decode_attention(plain, CLUSTER, shapes)
    assert "of KV" in read.formula and read.ms == pytest.approx(kv / calibration.rates()["MoE stage 1"].tb_s / 1e9)
    assert "3.57 Tflop of 16 heads" in decode_attention(verify, CLUSTER, shapes).formula
    assert "of KV" not in decode_attention(replace(plain, steps=3), CLUSTER, shapes, 1.0).formula


def test_aiters_timings_are_judged_by_fits_that_saw_no_timing_of_the_same_shape() -> None:
    rates = calibration.rates()
    kinds = {(kind.kernel, kind.bf16): kind for kind in calibration.held_out()}
    assert {kind: (found.shapes, len(found.errors)) for kind, found in kinds.items()} == {
        ("MoE stage 1", False): (1, 15), ("MoE stage 1", True): (2, 32), ("MoE stage 2", False): (1, 15),
        ("MoE stage 2", True): (2, 32), ("INT8 products", False): (2, 32), ("BF16 products", True): (2, 26),
    }  # fmt: skip
    medians = [statistics.median(found.errors) for found in kinds.values()]
    assert 0.10 < max(medians) <= 0.20  # even and odd rows of the same shapes would say 8%
    assert rates["MoE stage 1"].share == rates["INT8 products"].share  # one rate for dense products and experts


def test_no_fitted_figure_is_beyond_a_physical_limit() -> None:
    for name, fit in calibration.rates().items():
        assert fit.tb_s <= CLUSTER.gpu.hbm_tb_s and fit.share <= 1, name
    fast = [
        replace(one, published=one.published * (2 if "throughput" in one.key else 0.5)) for one in published_points()
    ]
    for fit in (calibrate(CLUSTER), fit_points(published_points(), CLUSTER), fit_points(fast, CLUSTER)):
        assert fit.decode_efficiency <= 1 and fit.prefill_efficiency <= 1 and fit.layer_s > 0


def test_the_page_has_the_errors_of_configurations_that_were_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    points.main()
    rows = [re.split(r" *\| *", row.strip("| ")) for row in capsys.readouterr().out.splitlines() if "%" in row]
    page = (DOCS / "perf/machine-model.md").read_text()
    assert len(rows) == 3 and [row for row in rows if f"| {' | '.join(row)} |" not in page] == []
    assert {(one.point, one.side, one.key, one.source) for one in points.held_out()} == {
        (one.point, one.side, one.key, one.source) for one in published_points()
    }


@pytest.mark.parametrize("load", [load for load, _ in PUBLISHED])
def test_a_recommended_change_meets_no_known_fault(load: Load) -> None:
    found = changes(load)
    names = [lever.change.name for lever in found if not lever.faults]
    assert "shared expert on a second stream" in names and "prefill all-reduces in INT8" not in names
    at_once = levers.together(account(load), found)
    assert not at_once.faults and at_once.throughput_tok_s >= max(x.throughput_tok_s for x in found if not x.faults)
    rates = [lever.throughput_tok_s for lever in found if not lever.faults]
    assert rates == sorted(rates, reverse=True)


def test_faults_of_a_setting_are_found() -> None:
    load = PUBLISHED[3][0]
    eight = ("speculative-num-steps=7", "speculative-num-draft-tokens=8")
    assert levers.faults(load, eight) == ("mla-verify-length",)
    assert "eagle-custom-all-reduce" in levers.faults(load, ("disable-custom-all-reduce=false",))
    assert levers.faults(load, ("env.SGLANG_ROCM_USE_MULTI_STREAM=1",)) == ()


def test_what_costs_time_is_kept_apart() -> None:
    found = account(PUBLISHED[3][0])
    (sampled,) = levers.costs(found)
    assert sampled.throughput_tok_s < levers.now(found).throughput_tok_s and sampled.change.prefill_ms == 0


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(2, None, 3, 10240, 512, as_json=False)
    shown = capsys.readouterr().out
    assert "unexplained" in shown and "tok/s" in shown
    main(2, None, 3, 10240, 512, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["load"]["accept_length"] == 3.97 and found["changes"][0]["tpot_ms"] == pytest.approx(5.4)


@pytest.mark.parametrize(
    ("tokens", "launches", "most_us"),
    [(2, 2, 34), (8, 2, 66), (40, 3, 183), (160, 4, 300), (257, 4, 310), (10240, 16, 1140)],
)
def test_launches_and_time_of_a_layer(tokens: int, launches: int, most_us: float) -> None:
    """The aims of the kernels, by the model."""
    parts = moe_time.ours(CLUSTER.gpu, KIMI, tokens)
    assert sum(part.launches for part in parts) == launches and sum(part.us for part in parts) <= most_us
    assert sum(part.us for part in parts) < sum(part.us for part in moe_time.aiter(CLUSTER.gpu, KIMI, tokens))


def test_the_page_says_what_could_shrink_a_prefill() -> None:
    load = Load(40, steps=3, accept_length=3.93)
    found = prefill.ways(account(load), changes(load), CLUSTER)
    page = (DOCS / "perf/machine-model.md").read_text()
    assert [way for way in found if f"| {' | '.join(prefill.cells(way))} |" not in page] == []
    reasons = [way for way in found if way.setting.startswith("none: ")]
    moe = next(lever.change for lever in changes(load) if lever.change.name == "MoE kernels of this package")
    tables = plans.table_rows(account(load), CLUSTER, moe)
    assert [row for rows in tables for row in rows if f"| {' | '.join(row)} |" not in page] == []
    assert {way.part for way in reasons} == {"all-reduces", "attention"}
    chunks = [way.saved_ms for way in found if way.part == "all"]
    assert chunks == sorted(chunks, reverse=True) and 0.0 in chunks  # agent's own
    batch = prefill.chunked_ms(account(replace(load, concurrency=1, input_len=8192)), CLUSTER, 8192)
    assert prefill.chunked_ms(account(load), CLUSTER, 8192) == pytest.approx(1.25 * batch)  # full batches


def test_ranks_that_share_attentions_input_move_and_multiply_less() -> None:
    """Of eight ranks each has an eighth of q_a and kv_a, and 3.3 units of traffic in a layer instead of 4."""
    found = account(Load(40, steps=3, accept_length=3.93))
    parts, rows = shares.saved_parts(found, CLUSTER), {row.name: row.ms for row in found.prefill}
    assert shares.repeated_share(CLUSTER) == pytest.approx(0.435, abs=0.001)
    assert parts["products"][0] == pytest.approx(rows["dense matrix products"] * 0.435 * 7 / 8, rel=0.01)
    units = 3 + (1536 + 576) / 7168 + 4 / 61  # and four gathers, of the captured states and the last residual
    assert rows["all-reduces"] - parts["links"][0] == pytest.approx(rows["all-reduces"] * units / 4, rel=1e-6)


@pytest.mark.parametrize(("load", "gain", "most"), [(PUBLISHED[3][0], 1.24, 1.335), (PUBLISHED[2][0], 1.12, 1.14)])
def test_each_recipe_is_faster_than_the_one_before_and_slower_than_the_floor(
    load: Load, gain: float, most: float
) -> None:
    moe = next(lever.change for lever in changes(load) if lever.change.name == "MoE kernels of this package")
    found = plans.plans(account(load), CLUSTER, moe)
    rates = [levers.throughput(load, plan.step_ms, plan.prefill_ms)[1] for plan in found]
    assert rates == sorted(rates) and rates[2] > gain * rates[0] and rates[3] > most * rates[0]
    assert plans.dense_step_ms(CLUSTER) == pytest.approx(61 * 5 * 0.0071 - 1.89 / 4.0, abs=0.01)
    assert found[-1].prefill_ms == pytest.approx(136, abs=1) and found[-1].step_ms < found[0].step_ms
    (quick,) = [one for one in plans.left(account(load), CLUSTER) if one.change.name.startswith("QuickReduce")]
    assert 0 < quick.change.prefill_ms < 0.01 * found[2].prefill_ms  # below the 2% of throughput for which it is worth


def test_the_pages_have_the_models_figures() -> None:
    found, page = account(Load(40, steps=3, accept_length=3.93)), (DOCS / "perf/machine-model.md").read_text()
    block = page[page.index("$ python -m proof.account -c 40") :].split("```")[0]
    shown = {row.split("|")[1].strip(): row for row in block.splitlines() if row.startswith("| ")}
    known = {lever.change.name: lever for lever in [levers.now(found), *changes(found.load)]}
    assert len(shown) == 7 and {*shown} <= {*known, "change, alone", ""}
    for name in shown.keys() & known.keys():
        saved = [f"{-ms:+.2f}" for ms in (known[name].change.step_ms, known[name].change.prefill_ms) if ms]
        assert re.findall(r"[-+]\d+\.\d+", shown[name]) == saved
        assert f" {known[name].throughput_tok_s:,.0f} tok/s " in shown[name]
    assert f"A step takes {found.step_ms:.1f} ms and a prefill of 10,240 tokens {found.prefill_ms:.0f} ms" in page


def test_logits_are_gathered_over_the_links() -> None:
    """160 rows of the target and 3 x 40 of the draft, with 163,840 BF16 logits each."""
    row = next(row for row in account(PUBLISHED[3][0]).step if row.name == "logits gather")
    assert "92 MB / 8 on each link" in row.formula and row.ms == pytest.approx(0.44, abs=0.01)


def test_an_engine_of_fewer_gpus_has_fewer_links() -> None:
    """One link of 64 GB/s joins every two GPUs: seven for each of eight, three of four, one of two."""
    message = 1e9
    for tp, links in ((8, 7), (4, 3), (2, 1)):
        assert Cluster(tp=tp).all_reduce_s(message) == pytest.approx(2 * (tp - 1) / tp * message / (links * 64e9))


def test_the_page_of_layouts_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    layouts.main(2.7)
    page = (DOCS / "perf/machine-model.md").read_text()
    head, *rows, pools = capsys.readouterr().out.splitlines()
    assert [row for row in (head, *rows) if row not in page] == [] and len(rows) == 9
    assert [pool for pool in re.findall(r"\d[\d,]+$|\d[\d,]+(?=, )", pools) if pool not in page] == []
    assert (LAYOUTS[0].kv_tokens, LAYOUTS[3].cluster.groups, LAYOUTS[3].chunk) == (1_702_894, 8, 2048)


def test_a_layout_is_priced_with_its_recipes_draft() -> None:
    assert [one.cluster.draft for one in LAYOUTS] == ["kimi-k2.5-eagle3"] + ["kimi-k2.5-eagle3-mla"] * 3
    mha, mla = Cluster(groups=8), Cluster(groups=8, draft="kimi-k2.5-eagle3-mla")
    tokens = [draft_bytes(8, 65536, one) - draft_bytes(8, 0, one) for one in (mha, mla)]
    assert tokens == [65536 * 2 * 64 * 128 * 2, 65536 * 4 * 576 * 2]  # all heads; a latent in four passes of 16 heads
    for one in (mha, mla):
        planned = draft_weights(ModelCard.packaged(one.draft), 1)["draft"]
        assert draft_bytes(8, 0, one) == pytest.approx(planned, rel=0.005)

"""Prometheus' own checker and unit tests on our rules; faults planted in each alert to see that those tests notice."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.prometheus import needs_prometheus
from support.repository import ROOT

from kimi_w4a8_eagle3.recipe.launch import load_recipe
from kimi_w4a8_lab.speed import published

PROMETHEUS = ROOT / "launch" / "prometheus"
RULES = PROMETHEUS / "rules" / "kimi.rules.yml"
GROUPS: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"]
}
ALERTS = [rule["alert"] for rule in GROUPS["kimi.alerts"]]
# SGLang's, the edges around the objectives (seconds); the whole lists are in its metrics_collector.py.
TTFT_EDGES = (6.0, 8.0, 10.0, 20.0, 40.0)
TPOT_EDGES = (0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1)
MARGIN = 1.15


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=120)


def unit_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return promtool("test", "rules", *sorted((folder / "tests").glob("*.yml")))


def with_fault(folder: Path, fault: dict[str, str]) -> Path:
    """A copy of the rules and their tests in which every alert has the same fault."""
    shutil.copytree(PROMETHEUS, folder)
    text = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in text["groups"] for rule in group["rules"] if "alert" in rule):
        rule.update(fault)
    (folder / "rules" / RULES.name).write_text(yaml.safe_dump(text))
    return folder


@needs_prometheus
def test_promtool_accepts_config_and_rules_and_they_do_what_their_unit_tests_say() -> None:
    for check in (("rules", RULES), ("config", PROMETHEUS / "prometheus.yml")):
        result = promtool("check", *check)
        assert result.returncode == 0, result.stdout + result.stderr
    for tests in (PROMETHEUS / "tests").glob("*.yml"):
        # Else promtool takes the groups in a random order, and one run in six sees no fault at the first minute.
        assert yaml.safe_load(tests.read_text())["group_eval_order"] == list(GROUPS), tests
    result = unit_tests(PROMETHEUS)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_prometheus
@pytest.mark.parametrize(
    "fault",
    [
        {"expr": "vector(0) > 1"},
        {"expr": 'group by (instance, replica, recipe) ({instance!=""})'},
        {"for": "0s"},
        {"for": "10h"},
    ],
    ids=["never", "always", "at-once", "too-late"],
)
def test_unit_tests_notice_a_broken_alert(fault: dict[str, str], tmp_path: Path) -> None:
    broken = with_fault(tmp_path / "prometheus", fault)
    assert promtool("check", "rules", broken / "rules" / RULES.name).returncode == 0
    result = unit_tests(broken)
    assert result.returncode == 1
    assert [alert for alert in ALERTS if alert not in result.stdout + result.stderr] == []


def test_every_alert_says_what_to_do_and_has_its_part_of_the_runbook() -> None:
    headings = re.findall(r"^### (Kimi\w+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
    for rule in GROUPS["kimi.alerts"]:
        assert re.fullmatch(r"\d+m|30s", rule["for"]) and rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        address = r'{{ or \$externalLabels.kimi_docs "docs" }}/runbook.md#' + rule["alert"].lower()
        assert re.fullmatch(address, rule["annotations"]["runbook_url"])


def objectives(record: str) -> dict[str, float]:
    rules = [rule for rule in GROUPS["kimi.objectives"] if rule["record"] == record]
    found = {rule["labels"]["recipe"]: float(re.fullmatch(r"vector\((.*)\)", rule["expr"])[1]) for rule in rules}
    assert len(found) == len(rules), "two objectives for one recipe"
    return found


def published_con40(recipe: str, figure: str) -> float:
    """In seconds; eagle3-opt has no TTFT of its own, the recipe that it extends has."""
    for name in (recipe, "eagle3"):
        con40, _ = published.reported(name, "con40")
        if figure in con40:
            return con40[figure] / 1000
    raise AssertionError(f"{recipe} has no published {figure}")


@pytest.mark.parametrize(
    ("record", "figure", "edges"),
    [
        ("kimi:objective_tpot_p50_seconds", "tpot_median_ms", TPOT_EDGES),
        ("kimi:objective_ttft_p50_seconds", "ttft_median_ms", TTFT_EDGES),
    ],
    ids=["tpot", "ttft"],
)
@pytest.mark.parametrize("recipe", ["eagle3-opt", "eagle3", "w4a8", "w4a16"])
def test_objectives_follow_the_published_figures(
    recipe: str, record: str, figure: str, edges: tuple[float, ...]
) -> None:
    least = published_con40(recipe, figure) * MARGIN
    assert objectives(record)[recipe] == min(edge for edge in edges if edge >= least)


def test_every_recipe_that_sglang_serves_has_its_objectives() -> None:
    recipes = [path.stem for path in (ROOT / "launch" / "recipes").glob("*.toml")]
    served = set(recipes)
    assert set(objectives("kimi:objective_tpot_p50_seconds")) == served
    assert set(objectives("kimi:objective_ttft_p50_seconds")) == served
    speculating = {name for name in served if load_recipe(name).draft is not None}
    assert set(objectives("kimi:objective_accept_length_min")) == speculating

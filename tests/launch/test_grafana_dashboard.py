"""The dashboard's JSON: current, as Grafana's own SDK reads it, laid out without overlaps, its PromQL well-formed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.dashboards import DASHBOARD, GRAFANA, expressions, filled, panels
from support.prometheus import needs_prometheus

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
RULES = GRAFANA.parent / "prometheus" / "rules" / "kimi.rules.yml"

needs_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")


@needs_sdk
def test_the_committed_json_is_what_the_generator_makes() -> None:
    generator = subprocess.run(
        [sys.executable, GRAFANA / "dashboard.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert generator.returncode == 0, generator.stderr


@needs_sdk
def test_grafanas_own_types_read_it_without_loss() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(BOARD), cls=JSONEncoder))
    # Fields of the Prometheus data source, which the SDK's annotations do not have.
    extra = {"step", "titleFormat", "textFormat", "tagKeys", "useValueForTime"}
    written, found = BOARD["annotations"]["list"], read["annotations"]["list"]
    assert [{**one, "builtIn": 0} for one in written] == [
        {**two, **{k: v for k, v in one.items() if k in extra}} for one, two in zip(written, found, strict=True)
    ]
    assert {**read, "annotations": None} == {**BOARD, "annotations": None}


def test_it_can_be_imported_anywhere() -> None:
    assert BOARD["schemaVersion"] >= 39
    assert BOARD["uid"] and BOARD["title"]
    assert "id" not in BOARD  # the id of another Grafana's database would clash
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "instance", "replica"]
    users = [*panels(BOARD), *(target for panel in panels(BOARD) for target in panel["targets"])]
    users += [*BOARD["annotations"]["list"], *BOARD["templating"]["list"][1:]]
    assert {json.dumps(user["datasource"], sort_keys=True) for user in users} == {
        '{"type": "prometheus", "uid": "${datasource}"}'
    }


def test_panels_have_ids_of_their_own_and_say_what_they_show() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in BOARD["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in panels(BOARD):
        assert panel["description"].endswith(".") or panel["description"].endswith("docs/runbook.md says what to do.")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_panels_do_not_overlap_and_stay_on_the_grid() -> None:
    boxes = [panel["gridPos"] for panel in BOARD["panels"]]
    for box in boxes:
        assert box["x"] >= 0 and box["w"] > 0 and box["h"] > 0 and box["x"] + box["w"] <= 24
    for one, other in combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} and {other} overlap"


@needs_prometheus
def test_every_expression_parses(tmp_path: Path) -> None:
    """Let promtool parse them all as recording rules, without a server."""
    rules = [{"record": f"panel:query:{i}", "expr": filled(expr)} for i, expr in enumerate(expressions(BOARD))]
    assert len(rules) > 50
    assert not [rule for rule in rules if "$" in rule["expr"]], "a variable was not filled in"
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_prometheus
@pytest.mark.parametrize("prefix", ["", "amd_"])
def test_gpu_panels_read_the_exporter_with_and_without_its_prefix(prefix: str, tmp_path: Path) -> None:
    (memory,) = (panel for panel in panels(BOARD) if panel["title"] == "GPU memory used")
    gpu = '{hostname="a", gpu_id="3", pod="x"}'
    series = {f"{prefix}gpu_used_vram{gpu}": "192000+0x3", f"{prefix}gpu_total_vram{gpu}": "256000+0x3"}
    share = {"labels": '{hostname="a", gpu_id="3"}', "value": 0.75}
    test = {
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": memory["targets"][0]["expr"], "eval_time": "2m", "exp_samples": [share]}],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    result = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_recorded_series_that_panels_use_are_recorded_by_the_rules() -> None:
    recorded = set(re.findall(r"record: (\S+)", RULES.read_text()))
    used = {name for expr in expressions(BOARD) for name in re.findall(r"kimi:\w+(?::\w+)?", expr)}
    assert used and used <= recorded


def test_provisioning_and_compose_fit_each_other() -> None:
    compose = yaml.safe_load((GRAFANA.parent / "monitoring.compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"] if volume.startswith("./"))
    for source in mounted:
        assert (GRAFANA.parent / source).is_dir()
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/kimi.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("$") in grafana["environment"]
    prometheus = yaml.safe_load((GRAFANA.parent / "prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert f":{prometheus['scrape_configs'][0]['static_configs'][0]['targets'][0].split(':')[1]}" == ":9528"

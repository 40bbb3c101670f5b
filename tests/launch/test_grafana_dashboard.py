"""The dashboard's JSON loads and queries metrics that exist, and the files around it fit each other."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.dashboards import DASHBOARD, GRAFANA, expressions, filled, panels
from support.prometheus import needs_prometheus
from support.repository import ROOT

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
RULES = GRAFANA.parent / "prometheus" / "rules" / "kimi.rules.yml"
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def test_it_can_be_imported_anywhere() -> None:
    assert BOARD["schemaVersion"] >= 39 and BOARD["uid"] and BOARD["title"]
    assert "id" not in BOARD  # the id of another Grafana's database would clash
    users = [target for panel in panels(BOARD) for target in (panel, *panel["targets"])]
    users += [*BOARD["annotations"]["list"], *BOARD["templating"]["list"][1:]]
    assert [one for one in users if one["datasource"] != {"type": "prometheus", "uid": "${datasource}"}] == []


def test_every_metric_that_it_queries_exists() -> None:
    """SGLang's by the source of the release, ours by our source, recorded series by the rules."""
    ours = "".join(path.read_text() for path in (ROOT / "kimi_w4a8_eagle3").rglob("*.py"))
    srt = Path(str(metadata.distribution("sglang").locate_file("sglang/srt")))
    sglang = "".join((srt / name).read_text() for name in ("observability/metrics_collector.py", "utils/common.py"))
    names = set(re.findall(r'"((?:kimi_|sglang:)\w+)"', ours + sglang))
    recorded = set(re.findall(r"record: (\S+)", RULES.read_text()))
    queried = set(re.findall(r"(?:kimi|sglang)[:_]\w+(?::\w+)?", " ".join(expressions(BOARD))))
    assert len(queried) > 30
    assert [name for name in queried if not {name, SUFFIX.sub("", name)} & (names | recorded)] == []


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

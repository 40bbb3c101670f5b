"""Writes dashboards/kimi.json from the rows in rows.py, with Grafana's own SDK.

python launch/grafana/dashboard.py            # after a change of it or them
python launch/grafana/dashboard.py --check    # fails when the JSON is not what this makes
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from panels import DATASOURCE
from queries import added, of
from rows import ROLLING, ROWS, UNPLANNED

OUTPUT = Path(__file__).parent / "dashboards" / "kimi.json"
UID = "kimi-w4a8-eagle3"


def events() -> list[dict[str, Any]]:
    """Events that are drawn over every panel."""
    unplanned, rolling = (of("kimi_replica_restarts_total", why) for why in (UNPLANNED, ROLLING))
    stalls = of("kimi_watchdog_stalls_total")
    firing = 'ALERTS{alertname=~"Kimi.*", alertstate="firing"}'
    drawn = [
        ("Restarts", "red", f"{added(unplanned, '1m')} > 0", "{{replica}} restarted", "{{reason}}"),
        ("Rolling restarts", "blue", f"{added(rolling, '1m')} > 0", "{{replica}}: rolling restart", ""),
        ("Watchdog", "purple", f"{added(stalls, '1m')} > 0", "{{replica}} stalled", ""),
        ("Alerts", "orange", firing, "{{alertname}}", "{{instance}} {{replica}}"),
    ]
    return [
        {
            "name": name,
            "datasource": {"type": DATASOURCE.type_val, "uid": DATASOURCE.uid},
            "enable": True,
            "hide": False,
            "iconColor": color,
            "expr": expr,
            "step": "15s",
            "titleFormat": title,
            "textFormat": text,
            "tagKeys": "instance,replica",
            "useValueForTime": False,
        }
        for name, color, expr, title, text in drawn
    ]


def variables() -> list[Any]:
    """Data source, endpoints, replicas. `All` also matches a bare SGLang server, which has no replica label."""
    engines = '__name__=~"kimi_replica_phase|sglang:num_running_reqs"'
    either = engines.replace('"', '"smg_http_connections_active|', 1)  # a router may be an instance of its own
    instance = (
        dashboard.QueryVariable("instance").label("Instance").query(_label_values("{" + either + "}", "instance"))
    )
    replica = (
        dashboard.QueryVariable("replica")
        .label("Replica")
        .query(_label_values("{" + engines + ', instance=~"$instance"}', "replica"))
    )
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        *(
            variable.datasource(DATASOURCE)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(everything)
            for variable in (instance, replica)
        ),
    ]


def _label_values(series: str, label: str) -> dict[str, object]:
    return {"query": f"label_values({series}, {label})", "refId": f"{label}s"}


def build() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    board = (
        dashboard.Dashboard("Kimi W4A8 EAGLE3")
        .uid(UID)
        .description("SGLang replicas behind a router: latency, speculation, memory, faults. docs/monitoring.md")
        .tags(["kimi", "sglang", "eagle3"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
    )
    for variable in variables():
        board.with_variable(variable)
    ids = count(1)
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels():
            board.with_panel(panel.id(next(ids)))
    found: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    found["annotations"] = {"list": events()}  # the SDK has no fields for Prometheus' titles and texts
    return found


def main() -> int:
    """Write the JSON, or compare it."""
    made = json.dumps(build(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        if OUTPUT.read_text() == made:
            return 0
        print(f"{OUTPUT} is not what {Path(__file__).name} makes: run it without --check", file=sys.stderr)
        return 1
    OUTPUT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The Grafana dashboard as data: its panels, and their PromQL with the variables filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "launch" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "kimi.json"


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels without the rows' titles."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any]) -> list[str]:
    """The PromQL of all panels and annotations."""
    of_panels = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return [*of_panels, *(annotation["expr"] for annotation in board["annotations"]["list"])]


def filled(expr: str, rate_interval: str = "1m") -> str:
    """The query that Grafana sends when `All` is chosen."""
    values = {"$__rate_interval": rate_interval, "$instance": ".*", "$replica": ".*"}
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr

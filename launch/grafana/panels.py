"""Look of the panels: thin builders over Grafana's SDK, so that a row of the dashboard reads as a list of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
OBJECTIVE = "objective"  # series whose legend begins so are drawn as a dashed red line
Query = tuple[str, str]  # PromQL, legend
Steps = Sequence[tuple[float | None, str]]  # (from this value on, colour); the first value is None

_P = TypeVar("_P")
OF_OBJECTIVE = {
    "of objective": {
        "unit": "percentunit",
        "decimals": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [
                {"value": None, "color": "green"},
                {"value": 0.8, "color": "orange"},
                {"value": 1, "color": "red"},
            ],
        },
    }
}


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    stacked: bool = False,
    top: float | None = None,
    decimals: int | None = None,
    span: int = 8,
) -> timeseries.Panel:
    """Series over time from zero up; `stacked` where the sum is the message."""
    panel = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(35 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .axis_soft_min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .override_by_regexp(
            f"^{OBJECTIVE}.*",
            [
                _value("color", {"mode": "fixed", "fixedColor": "red"}),
                _value("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
                _value("custom.fillOpacity", 0),
                _value("custom.stacking", {"mode": "none", "group": "A"}),
            ],
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.max(top)
    if decimals is not None:
        panel.decimals(decimals)
    return _common(panel, title, description, unit, queries).height(9).span(span)


def number(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    steps: Steps = ((None, "text"),),
    decimals: int | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> stat.Panel:
    """The value now, large, coloured by its thresholds; overrides: field options by legend."""
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_models.BigValueGraphMode.AREA if len(queries) == 1 else common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .thresholds(_thresholds(steps))
        .no_value("–")
    )
    if decimals is not None:
        panel.decimals(decimals)
    for legend, options in (overrides or {}).items():
        panel.override_by_name(legend, [_value(key, value) for key, value in options.items()])
    return _common(panel, title, description, unit, queries).height(4).span(4)


def facts(title: str, description: str, queries: Sequence[Query]) -> stat.Panel:
    """Return a panel of the labels' values with their counts."""
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)
        .text(common.VizTextDisplayOptions().title_size(16).value_size(32))
        .color_mode(common_models.BigValueColorMode.NONE)
    )
    return _common(panel, title, description, "none", queries).height(9).span(4)


def states(
    title: str, description: str, queries: Sequence[Query], names: Mapping[int, tuple[str, str]]
) -> statetimeline.Panel:
    """Named states over time, one bar a series; names: value -> (text, colour)."""
    options = {
        str(value): models.ValueMappingResult(text=name, color=color, index=index)
        for index, (value, (name, color)) in enumerate(names.items())
    }
    panel = (
        statetimeline.Panel()
        .mappings([models.ValueMap(options=options)])
        .merge_values(True)
        .show_value(common_models.VisibilityMode.AUTO)
        .row_height(0.8)
        .fill_opacity(85)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    return _common(panel, title, description, "none", queries).height(5).span(24)


def bars(title: str, description: str, unit: str, queries: Sequence[Query], *, top: float) -> bargauge.Panel:
    """Values of now beside each other."""
    panel = (
        bargauge.Panel()
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .min(0)
        .max(top)
        .decimals(2)
        .thresholds(_thresholds(((None, "blue"),)))
    )
    return _common(panel, title, description, unit, queries).height(9).span(8)


def _common(panel: _P, title: str, description: str, unit: str, queries: Sequence[Query]) -> _P:
    panel.title(title).description(description).unit(unit).datasource(DATASOURCE)  # type: ignore[attr-defined]
    for letter, (expr, legend) in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(  # type: ignore[attr-defined]
            prometheus.Dataquery().ref_id(letter).expr(expr).legend_format(legend).range().datasource(DATASOURCE)
        )
    return panel


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    found = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def _value(key: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=key, value=value)

"""Merges Prometheus expositions of several processes into one: a family once, every sample with its replica's label.

Concatenating the texts is not an exposition: each family may be declared once, with all its samples in one group.
prometheus_client writes; what is here only regroups samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Source:
    """One process's exposition; `labels` are added to every sample of it."""

    families: tuple[Metric, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


def merge(sources: Iterable[Source]) -> list[Metric]:
    """Families of all sources by name, in the order in which they first appear.

    A label of the same name in the source becomes `exported_NAME`, as in Prometheus' own scrapes. The first source
    decides a family's type and help; a family of another type under that name is left out, because mixing the two
    would make the whole exposition invalid. So is a series that its source repeats.
    """
    merged: dict[str, Metric] = {}
    for source in sources:
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for family in source.families:
            empty = Metric(family.name, family.documentation, family.type)
            target = merged.setdefault(_exposed_name(family), empty)
            if target.type != family.type:
                continue
            for sample in family.samples:
                labelled = _labelled(sample, source.labels)
                series = (labelled.name, frozenset(labelled.labels.items()))
                if series not in seen:
                    seen.add(series)
                    target.samples.append(labelled)
    return list(merged.values())


def render(families: Iterable[Metric]) -> bytes:
    """Prometheus text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _exposed_name(family: Metric) -> str:
    """The name in the text: prometheus_client keeps counters without their `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    if not labels:
        return sample
    own = {f"exported_{name}" if name in labels else name: value for name, value in sample.labels.items()}
    return sample._replace(labels={**own, **labels})

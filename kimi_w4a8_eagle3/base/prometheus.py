"""Prometheus text: families as written, sums and gauges by name, merged expositions. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def parse(text: str) -> tuple[Metric, ...]:
    """Return the families of an exposition; raise ValueError when the text is not one."""
    return tuple(_keep_names(text_string_to_metric_families(text), text))


@dataclass(frozen=True)
class Reading:
    """The samples of one exposition by name."""

    samples: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Parse an exposition; raise ValueError when the text is not one."""
        return cls.of(parse(text))

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Reading:
        """Group the samples of families that are already parsed."""
        by_name: dict[str, list[Sample]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                by_name[sample.name].append(sample)
        return cls({name: tuple(samples) for name, samples in by_name.items()})

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with these labels; None when there is none."""
        found = [sample.value for sample in self.samples.get(name, ()) if _matches(sample, labels)]
        return sum(found) if found else None

    def largest(self, name: str, **labels: str) -> float | None:
        """Return the largest sample. For a gauge that every rank reports, this is the rank that limits the others."""
        found = (sample.value for sample in self.samples.get(name, ()) if _matches(sample, labels))
        return max((value for value in found if not math.isnan(value)), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return sums of a name's samples by the value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self.samples.get(name, ()):
            sums[sample.labels.get(label, "")] += sample.value
        return dict(sums)

    def labels(self, name: str, label: str, value: float | None = None) -> tuple[str, ...]:
        """Return the values of a label over a name's samples (with that value), without duplicates, in order."""
        found = (s.labels[label] for s in self.samples.get(name, ()) if value is None or s.value == value)
        return tuple(dict.fromkeys(found))


def _keep_names(families: Iterable[Metric], text: str) -> Iterator[Metric]:
    """Undo the parser's renaming of counters without `_total`: they keep their names, as untyped families."""
    for family in families:
        if family.type == "counter" and f"# TYPE {family.name}_total " not in text:
            original = Metric(family.name, family.documentation, "untyped")
            original.samples = [s._replace(name=s.name.removesuffix("_total")) for s in family.samples]
            yield original
        else:
            yield family


def _matches(sample: Sample, labels: Mapping[str, str]) -> bool:
    return all(sample.labels.get(name) == value for name, value in labels.items())


def merge(*sources: Iterable[Metric]) -> list[Metric]:
    """Merge families of all sources by name, in the order in which they first appear.

    The first source decides a family's type and help. A family of another type under that name is left out, because a
    mix would make the whole exposition invalid. So is a series that was there already.
    """
    merged: dict[str, Metric] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in chain(*sources):
        empty = Metric(family.name, family.documentation, family.type)
        # prometheus_client keeps a counter's name without the `_total` that the text has.
        target = merged.setdefault(family.name + ("_total" if family.type == "counter" else ""), empty)
        for sample in family.samples if target.type == family.type else ():
            series = (sample.name, frozenset(sample.labels.items()))
            if series not in seen:
                seen.add(series)
                target.samples.append(sample)
    return list(merged.values())


def render(families: Iterable[Metric]) -> bytes:
    """Render families as Prometheus text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families

"""The one reader of Prometheus text: families as written, sums and gauges by name and labels. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
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

"""The one reader of Prometheus text: families as written; sums and gauges by name and labels. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def parse(text: str) -> tuple[Metric, ...]:
    """The families of an exposition; raises ValueError when it is none."""
    return tuple(_keep_names(text_string_to_metric_families(text), text))


@dataclass(frozen=True)
class Reading:
    """The samples of one exposition by name."""

    samples: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Raises ValueError when the text is no exposition."""
        return cls.of(parse(text))

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Reading:
        """A reading of families that are parsed already."""
        by_name: dict[str, list[Sample]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                by_name[sample.name].append(sample)
        return cls({name: tuple(samples) for name, samples in by_name.items()})

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples with these labels; None when there is none."""
        found = [sample.value for sample in self.samples.get(name, ()) if _matches(sample, labels)]
        return sum(found) if found else None

    def largest(self, name: str, **labels: str) -> float | None:
        """The largest sample: of a gauge that every rank reports, the rank that limits the others."""
        found = (sample.value for sample in self.samples.get(name, ()) if _matches(sample, labels))
        return max((value for value in found if not math.isnan(value)), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of the samples of a name by the value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self.samples.get(name, ()):
            sums[sample.labels.get(label, "")] += sample.value
        return dict(sums)

    def labels(self, name: str, label: str, value: float | None = None) -> tuple[str, ...]:
        """The values of a label over the samples of a name (with that value), each once, in order."""
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

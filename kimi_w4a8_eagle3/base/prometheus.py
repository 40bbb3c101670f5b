"""The one reader of Prometheus text: families as written; sums, gauges and buckets by name and labels. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Buckets = dict[float, float]  # upper bound -> observations up to it


def parse(text: str) -> tuple[Metric, ...]:
    """The families of an exposition; raises ValueError when it is none."""
    return tuple(_keep_names(text_string_to_metric_families(text), text))


@dataclass(frozen=True)
class Reading:
    """The samples of one exposition by name, taken `at` seconds (monotonic)."""

    at: float
    samples: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str, at: float = 0.0) -> Reading:
        """Raises ValueError when the text is no exposition."""
        return cls.of(parse(text), at)

    @classmethod
    def of(cls, families: Iterable[Metric], at: float = 0.0) -> Reading:
        """A reading of families that are parsed already."""
        by_name: dict[str, list[Sample]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                by_name[sample.name].append(sample)
        return cls(at, {name: tuple(samples) for name, samples in by_name.items()})

    def only(self, **labels: str) -> Reading:
        """The samples that carry these labels."""
        kept = {name: tuple(s for s in samples if _matches(s, labels)) for name, samples in self.samples.items()}
        return Reading(self.at, {name: samples for name, samples in kept.items() if samples})

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples with these labels; None when there is none."""
        found = [sample.value for sample in self.samples.get(name, ()) if _matches(sample, labels)]
        return sum(found) if found else None

    def largest(self, name: str) -> float | None:
        """The largest sample: of a gauge that every rank reports, the rank that limits the others."""
        return max(self._numbers(name), default=None)

    def least(self, name: str) -> float | None:
        """The least sample."""
        return min(self._numbers(name), default=None)

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

    def buckets(self, name: str) -> Buckets:
        """A histogram, summed over its labels."""
        sums: Buckets = defaultdict(float)
        for sample in self.samples.get(f"{name}_bucket", ()):
            sums[float(sample.labels["le"])] += sample.value
        return dict(sums)

    def _numbers(self, name: str) -> Iterator[float]:
        return (sample.value for sample in self.samples.get(name, ()) if not math.isnan(sample.value))


def increase(earlier: float | None, later: float | None) -> float:
    """Growth of a counter; one that fell was reset by a restart and counts from zero, one that is absent is zero."""
    before, after = earlier or 0.0, later or 0.0
    return after - before if after >= before else after


def bucket_increase(earlier: Buckets, later: Buckets) -> Buckets:
    """Growth of a histogram, with the same rule for all buckets together."""
    reset = any(later.get(bound, 0.0) < count for bound, count in earlier.items())
    return dict(later) if reset else {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def quantile(share: float, buckets: Buckets) -> float | None:
    """Prometheus' histogram_quantile: linear inside the bucket; the last finite bound when it lies beyond.

    None without observations. The answer is as exact as the buckets are narrow.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank = share * total
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (buckets[bound] - below)
        lower, below = (lower if math.isinf(bound) else bound), buckets[bound]
    return lower


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

"""Metrics for monitoring, in Prometheus' text format: gauges are read off the pairs, and events are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.records import UpdateRecord

__all__ = ["Metrics"]

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Metrics:
    """Counters of one gateway, and gauges that are read off its `pairs`."""

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Now(pairs))
        names = ("pair", "instance")
        self._updates = Counter(
            "weightcast_updates",
            "Updates of an instance that have ended, by outcome.",
            (*names, "outcome"),
            registry=registry,
        )
        text = "Transfers of layers whose placement had changed under a transfer."
        self._resends = Counter("weightcast_resends", text, names, registry=registry)
        text = "Tensors with values that were not finite, in updates of an instance."
        self._non_finite = Counter("weightcast_non_finite_tensors", text, names, registry=registry)
        text = "Duration of updates that were committed."
        self._seconds = Histogram("weightcast_update_seconds", text, names, buckets=_SECONDS, registry=registry)
        text = "Requests that were refused before a route saw them, by status."
        self._refused = Counter("weightcast_refused_requests", text, ("status",), registry=registry)

    def updated(self, pair: str, instance: str, record: UpdateRecord) -> None:
        """Counts an update of an instance that has ended."""
        outcome = "committed" if record.committed else "fenced" if record.fenced else "refused"
        self._updates.labels(pair, instance, outcome).inc()
        if record.resends:
            self._resends.labels(pair, instance).inc(record.resends)
        if record.non_finite_tensors:
            self._non_finite.labels(pair, instance).inc(record.non_finite_tensors)
        if record.committed:
            self._seconds.labels(pair, instance).observe(record.seconds)

    def refused(self, status: int) -> None:
        """Counts a request that was refused for its token, its scope or its size."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Gauges that are read off the pairs."""

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        names = ["pair", "instance"]
        version = GaugeMetricFamily("weightcast_version", "Version that was committed last.", labels=names)
        lineage = GaugeMetricFamily("weightcast_lineage", "Lineage of that version.", labels=names)
        serves = GaugeMetricFamily("weightcast_serves", "1 if the instance may answer with its version.", labels=names)
        fenced = GaugeMetricFamily("weightcast_fenced", "1 if only a full update lets it serve.", labels=names)
        silent = GaugeMetricFamily("weightcast_silent_ranks", "Ranks that are no longer heard from.", labels=names)
        phase = GaugeMetricFamily("weightcast_phase", "1 for the phase it is in.", labels=[*names, "phase"])
        trainer = GaugeMetricFamily("weightcast_trainer_silent_ranks", "The same of the trainer.", labels=["pair"])
        for pair in tuple(self._pairs.values()):
            trainer.add_metric([pair.spec.name], len(pair.silent))
            for instance in tuple(pair.instances.values()):
                labels = [pair.spec.name, instance.name]
                if instance.record.version is not None:
                    version.add_metric(labels, instance.record.version.number)
                    lineage.add_metric(labels, instance.record.version.lineage)
                serves.add_metric(labels, instance.serves)
                fenced.add_metric(labels, instance.record.fenced)
                silent.add_metric(labels, len(instance.silent))
                for state in Phase:
                    phase.add_metric([*labels, state.value], state is instance.record.phase)
        yield from (version, lineage, serves, fenced, silent, phase, trainer)

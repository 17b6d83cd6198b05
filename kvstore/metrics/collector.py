"""The store's numbers in Prometheus' text format, read when somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore import version
from kvstore.metrics.catalog import CALLS, COUNTER, METRICS, Snapshot
from kvstore.service.call_times import BOUNDS_S, CallTimes
from kvstore.service.core import Core

_BOUNDS = (*map(str, BOUNDS_S), "+Inf")


class StoreCollector(Collector):
    """Makes the families of all metrics from one snapshot."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._started = time.time()

    def collect(self) -> Iterator[Metric]:
        store = self._core.store
        snapshot = Snapshot(
            stats=store.stats(),
            namespaces=tuple(store.namespaces()),
            transports=tuple(session.transport for session in store.sessions()),
            bytes_sent=self._core.bytes_sent,
            bytes_received=self._core.bytes_received,
            calls=self._core.calls,
            version=version(),
            started=self._started,
        )
        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = make(metric.name, metric.meaning, labels=metric.labels)
            for labels, value in metric.read(snapshot):
                family.add_metric(labels, value)
            yield family
        yield _histogram(snapshot.calls)


def renderer(core: Core) -> CollectorRegistry:
    """A registry of its own: nothing of the process that embeds this is in it."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(core))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The whole text of one scrape."""
    return generate_latest(registry)


def _histogram(calls: CallTimes) -> HistogramMetricFamily:
    name, _, labels, meaning = CALLS
    family = HistogramMetricFamily(name, meaning, labels=labels)
    for key, times in sorted(calls.times.items()):
        counts = accumulate(times.buckets)
        family.add_metric(key, list(zip(_BOUNDS, counts, strict=True)), times.seconds)
    return family

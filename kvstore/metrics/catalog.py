"""Every metric: its name, type, labels, meaning, and how it is read. The documents' table is made of this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvstore.service.call_times import CallTimes
from kvstore.store.stats import NamespaceStats, StoreStats

COUNTER = "counter"
GAUGE = "gauge"
Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read at one scrape, in one step of the event loop: the numbers fit each other. Times in seconds."""

    stats: StoreStats
    namespaces: tuple[NamespaceStats, ...]
    transports: tuple[str, ...]
    bytes_sent: int
    bytes_received: int
    calls: CallTimes
    version: str
    started: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, without the `_total` that a counter's samples get."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    read: Callable[[Snapshot], Iterable[Sample]]

    @property
    def shown(self) -> str:
        """The name as it is queried."""
        return f"{self.name}_total" if self.kind == COUNTER else self.name


def _slots(namespace: NamespaceStats) -> tuple[tuple[str, int], ...]:
    return (
        ("free", namespace.free),
        ("private", namespace.private),
        ("committed", namespace.committed),
        ("condemned", namespace.condemned),
    )


def _labels(namespace: NamespaceStats) -> tuple[str, str, str]:
    return (str(namespace.namespace_id), namespace.model_name, namespace.codec)


def _namespace_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    for namespace in snapshot.namespaces:
        for state, slots in _slots(namespace):
            yield (*_labels(namespace), state), slots * namespace.block_bytes


def _device_bytes(snapshot: Snapshot) -> Iterator[Sample]:
    # A store has one device, so the sum over the namespaces is the device's.
    for device in snapshot.stats.devices:
        sums = {"free": 0, "private": 0, "committed": 0, "condemned": 0}
        for namespace in snapshot.namespaces:
            for state, slots in _slots(namespace):
                sums[state] += slots * namespace.block_bytes
        for state, nbytes in sums.items():
            yield (device.device, state), nbytes


def _slabs(snapshot: Snapshot) -> Iterator[Sample]:
    for device in snapshot.stats.devices:
        yield (device.device, "live"), device.slabs_live
        yield (device.device, "draining"), device.slabs_draining


def _lookups(snapshot: Snapshot) -> Iterator[Sample]:
    sums = snapshot.stats.counters
    yield ("all",), sums.found_all
    yield ("part",), sums.found_part
    yield ("none",), sums.found_none


def _of_namespaces(read: Callable[[NamespaceStats], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [(_labels(namespace), read(namespace)) for namespace in snapshot.namespaces]


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda snapshot: [((), read(snapshot))]


def _sum(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return _one(lambda snapshot: getattr(snapshot.stats.counters, name))


_NAMESPACE = ("namespace", "model", "codec")
METRICS = (
    Metric("kvstore_lookups", COUNTER, ("found",),
           "Look-ups, one a query, by what they found: all, part or none. Their sum is all look-ups.", _lookups),
    Metric("kvstore_lookup_misses", COUNTER, ("reason",),
           "Look-ups that did not find everything, by the reason of the first missing block. "
           "Their sum is that of part and none.",
           lambda s: [((reason.name.lower(),), count) for reason, count in s.stats.counters.misses.items()]),
    Metric("kvstore_lookup_tokens", COUNTER, (), "Tokens asked for, in whole blocks.", _sum("lookup_tokens")),
    Metric("kvstore_hit_tokens", COUNTER, (), "Tokens found: those that need not be computed.", _sum("hit_tokens")),
    Metric("kvstore_lookup_blocks", COUNTER, (), "Blocks asked for.", _sum("lookup_blocks")),
    Metric("kvstore_hit_blocks", COUNTER, (), "Blocks found.", _sum("hit_blocks")),
    Metric("kvstore_blocks_committed", COUNTER, (), "Blocks committed.", _sum("commits")),
    Metric("kvstore_commit_losses", COUNTER, (), "Commits that came second.", _sum("commit_losses")),
    Metric("kvstore_evictions", COUNTER, (), "Blocks evicted.", _sum("evictions")),
    Metric("kvstore_damaged_blocks", COUNTER, (), "Blocks found damaged.", _sum("damaged")),
    Metric("kvstore_slots_short", COUNTER, (),
           "Slots that a reservation asked for and did not get.", _sum("reserve_short")),
    Metric("kvstore_blocks_not_shared", COUNTER, (),
           "Blocks that writers kept to themselves because of their error.", _sum("blocks_not_shared_error")),
    Metric("kvstore_transport_sent_bytes", COUNTER, (),
           "Payload bytes sent by the bytes transport.", _one(lambda s: s.bytes_sent)),
    Metric("kvstore_transport_received_bytes", COUNTER, (),
           "Payload bytes received by the bytes transport.", _one(lambda s: s.bytes_received)),
    Metric("kvstore_blocks_bytes", GAUGE, ("device", "state"),
           "Bytes of blocks by the state of their slots: free, private, committed or condemned.", _device_bytes),
    Metric("kvstore_namespace_blocks_bytes", GAUGE, (*_NAMESPACE, "state"),
           "The same, by namespace.", _namespace_bytes),
    Metric("kvstore_budget_bytes", GAUGE, ("device",), "Hard limit of the memory.",
           lambda s: [((device.device,), device.budget_bytes) for device in s.stats.devices]),
    Metric("kvstore_used_bytes", GAUGE, ("device",), "Bytes of slabs and ledgers, counted against the budget.",
           lambda s: [((device.device,), device.used_bytes) for device in s.stats.devices]),
    Metric("kvstore_slabs", GAUGE, ("device", "state"),
           "Slabs: live, or draining until their mappings are gone.", _slabs),
    Metric("kvstore_pinned_blocks", GAUGE, ("device",), "Blocks of pinned chains.",
           lambda s: [((device.device,), device.blocks_pinned) for device in s.stats.devices]),
    Metric("kvstore_leases", GAUGE, (), "Living leases.", _one(lambda s: s.stats.leases)),
    Metric("kvstore_sessions", GAUGE, ("transport",), "Living sessions.",
           lambda s: [((name,), count) for name, count in sorted(Counter(s.transports).items())]),
    Metric("kvstore_mean_error_ratio", GAUGE, _NAMESPACE,
           "Mean error of the committed blocks; 0 without blocks.", _of_namespaces(lambda n: n.mean_error)),
    Metric("kvstore_largest_error_ratio", GAUGE, _NAMESPACE,
           "Largest error of the committed blocks; 0 without blocks.", _of_namespaces(lambda n: n.largest_error)),
    Metric("kvstore_build_info", GAUGE, ("version",), "Always 1; the label says the version.",
           lambda s: [((s.version,), 1)]),
    Metric("kvstore_start_time_seconds", GAUGE, (),
           "When the server process started, in seconds since 1970.", _one(lambda s: s.started)),
)  # fmt: skip
CALLS = ("kvstore_call_duration_seconds", "histogram", ("method", "code"), "Calls by RPC and gRPC code.")


def rows() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and meaning of all metrics, the histogram of the calls last."""
    return [*((metric.shown, metric.kind, metric.labels, metric.meaning) for metric in METRICS), CALLS]

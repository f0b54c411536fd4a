"""Metrics for Prometheus and what reads its formats, from snapshots; needs prometheus-client.

    prometheus_client.REGISTRY.register(Metrics(store.snapshot))      # beside an application's own
    body, content_type = exposition(store.snapshot)                   # or all by itself

Every scrape is one snapshot, so that its figures fit together: hits + misses = tokens asked in each. Names follow
https://prometheus.io/docs/practices/naming: base units, `_total` for what only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .change import KINDS
from .snapshot import Snapshot

_TIERS = ("hot", "warm", "cold")

_COUNTERS = (
    ("requests", "requests", "Requests that engines reported as served"),
    ("lookups", "lookups", "Look-ups"),
    ("stored_tokens", "tokens_stored", "Tokens whose KV was stored"),
    ("found_elsewhere_tokens", "tokens_found_elsewhere", "Tokens found in moved runs, used or not"),
    ("flash_read_bytes", "bytes_read", "Bytes read from flash"),
    ("invalidated_blocks", "invalidated", "Blocks that users dropped"),
    ("leases_abandoned", "leases_abandoned", "Leases that were collected without a release"),
)


class Metrics(Collector):
    """A collector over `source`, which gives snapshots: `KVStore.snapshot`, or what asks a daemon for one."""

    def __init__(self, source: Callable[[], Snapshot]) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that to register costs no snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics of one snapshot."""
        now = self._source()
        yield from _tokens(now)
        yield from _tiers(now)
        yield from _reasons(now)
        yield from _flash(now)
        yield from _stages(now)
        for name, count, text in _COUNTERS:
            yield CounterMetricFamily(f"kvstore_{name}", text, value=now.stats.counts.get(count, 0))


def exposition(source: Callable[[], Snapshot], accept: str = "") -> tuple[bytes, str]:
    """What a scraper that accepts `accept` gets, and its content type: OpenMetrics if possible, else text."""
    registry = CollectorRegistry()
    registry.register(Metrics(source))
    encode, content_type = choose_encoder(accept)
    body: bytes = encode(registry)
    return body, content_type


def _tokens(now: Snapshot) -> Iterator[Metric]:
    counts = now.stats.counts
    kinds = CounterMetricFamily(
        "kvstore_lookup_tokens",
        "Tokens of served prompts: loaded as a prefix, moved here, moved and recomputed, computed",
        labels=["kind"],
    )
    for kind in KINDS:
        kinds.add_metric([kind], counts.get(f"tokens_{kind}", 0))
    yield kinds
    asked = CounterMetricFamily(
        "kvstore_asked_tokens", "Tokens that were looked up: held as a prefix, or not", labels=["result"]
    )
    asked.add_metric(["hit"], counts.get("tokens_matched", 0))
    asked.add_metric(["miss"], counts.get("tokens_missed", 0))
    yield asked
    for name, text in (
        ("saved", "Seconds of time to first token saved, estimated by the engine's costs without the store"),
        ("lost", "Seconds by which requests took longer than the engine's costs without the store"),
    ):
        seconds = counts.get(f"ttft_{name}_us", 0) / 1e6
        yield CounterMetricFamily(f"kvstore_ttft_{name}_seconds", text, value=seconds)


def _tiers(now: Snapshot) -> Iterator[Metric]:
    nbytes = GaugeMetricFamily(
        "kvstore_tier_bytes", "Bytes of a tier; used + free is its budget", labels=["tier", "state"]
    )
    blocks = GaugeMetricFamily(
        "kvstore_tier_blocks", "Blocks in a tier; leased ones are among the held", labels=["tier", "state"]
    )
    evicted = CounterMetricFamily(
        "kvstore_evicted_blocks", "Blocks that left a tier for want of room", labels=["tier"]
    )
    for name in _TIERS:
        tier = getattr(now.stats, name)
        nbytes.add_metric([name, "used"], tier.used)
        nbytes.add_metric([name, "free"], tier.free)
        blocks.add_metric([name, "held"], tier.blocks)
        blocks.add_metric([name, "leased"], tier.leased)
        evicted.add_metric([name], now.stats.counts.get(f"evicted_{name}", 0))
    yield from (nbytes, blocks, evicted)
    moved = CounterMetricFamily(
        "kvstore_moved_blocks", "Blocks moved between tiers of memory", labels=["source", "target"]
    )
    for source, target in (("warm", "hot"), ("hot", "warm")):
        moved.add_metric([source, target], now.stats.counts.get(f"moved_{source}_{target}", 0))
    yield moved
    yield GaugeMetricFamily("kvstore_waiting_blocks", "Blocks on their way to flash", value=now.stats.waiting)


def _reasons(now: Snapshot) -> Iterator[Metric]:
    for name, found, text in (
        ("refused", now.stats.refusals, "What was not stored: tokens of a put, or blocks for flash"),
        ("unusable", now.stats.misses, "What was held and could not be used: tokens, or damaged blocks"),
        ("bad_records", now.stats.bad_records, "Damaged records on flash"),
    ):
        family = CounterMetricFamily(f"kvstore_{name}", text, labels=["reason"])
        for reason, count in sorted(found.items()):
            family.add_metric([reason], count)
        yield family


def _flash(now: Snapshot) -> Iterator[Metric]:
    counts = now.stats.counts
    yield CounterMetricFamily(
        "kvstore_flash_bytes_written", "Bytes written to flash", value=counts.get("bytes_written", 0)
    )
    budget = GaugeMetricFamily(
        "kvstore_flash_write_budget_bytes",
        "Bytes that were, and may be, written to flash today (UTC)",
        labels=["state"],
    )
    if now.writes_per_day is not None:
        spent = counts.get("bytes_written_today", 0)
        budget.add_metric(["spent"], spent)
        budget.add_metric(["left"], max(0, now.writes_per_day - spent))
    yield budget
    if now.flash_bytes_per_second is not None:
        yield GaugeMetricFamily(
            "kvstore_flash_bytes_per_second",
            "Speed at which loads bring KV from flash into place, lately",
            value=now.flash_bytes_per_second,
        )
    ahead = CounterMetricFamily(
        "kvstore_prefetch_bytes", "Bytes read ahead of requests, and what became of them", labels=["outcome"]
    )
    for outcome in ("read", "used", "wasted", "cancelled"):
        ahead.add_metric([outcome], counts.get(f"bytes_prefetched_{outcome}", 0))
    yield ahead


def _stages(now: Snapshot) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "kvstore_stage_seconds", "Seconds that a stage took, counted while someone looks", labels=["stage"]
    )
    for name, use in now.stages.items():
        total, buckets = 0, []
        for bound, count in zip((*now.bounds, float("inf")), use.counts, strict=True):
            total += count
            buckets.append((f"{bound:g}" if bound != float("inf") else "+Inf", float(total)))
        family.add_metric([name], buckets, sum_value=use.seconds)
    yield family

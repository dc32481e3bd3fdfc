"""The collector's own metrics, on a registry of their own. Labels are few and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from servoscope.exporters.catalog import metric

if TYPE_CHECKING:
    from pathlib import Path

    from servoscope.exporters.wire import Batch

__all__ = ["CONTENT_TYPE", "Telemetry"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Telemetry:
    """Counters of one collector process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str) -> Counter:
            line = metric(f"collector_{name}_total")
            return Counter(line.full_name, line.help, line.labels, registry=self.registry)

        def gauge(name: str) -> Gauge:
            line = metric(f"collector_{name}")
            return Gauge(line.full_name, line.help, line.labels, registry=self.registry)

        def seconds(name: str) -> Histogram:
            line = metric(f"collector_{name}_seconds")
            return Histogram(
                line.full_name, line.help, line.labels, registry=self.registry, buckets=line.buckets
            )

        self.batches = counter("batches")
        self.records = counter("records")
        self.refused_values = counter("refused_values")
        self.unknown_columns = counter("unknown_columns")
        self.questions = counter("questions")
        self.expired_records = counter("expired_records")
        self.refused_hosts = counter("refused_hosts")
        self.pending = gauge("pending_batches")
        self.store_bytes = gauge("store_bytes")
        self.up = gauge("store_up")
        self.clock_doubtful = gauge("clock_doubtful")
        self.decode_seconds = seconds("decode")
        self.insert_seconds = seconds("insert")
        for result in ("stored", "duplicate", "refused", "busy", "failed"):
            self.batches.labels(result)  # a series from the start: rate() sees the first one
        for result in ("stored", "refused"):
            self.records.labels(result)
        for result in ("answered", "busy", "failed"):
            self.questions.labels(result)
        for reason in ("age", "future", "size"):
            self.expired_records.labels(reason)

    def count(self, batch: Batch, *, duplicate: bool) -> None:
        """Count a batch that is now stored (or was before)."""
        self.batches.labels("duplicate" if duplicate else "stored").inc()
        if not duplicate:
            self.records.labels("stored").inc(len(batch))
            self.records.labels("refused").inc(batch.refused_rows)
            self.refused_values.inc(batch.refused_values)
            self.unknown_columns.inc(len(batch.unknown_columns))

    def render(self, database: Path) -> bytes:
        """The text of /metrics."""
        total = 0
        for path in (database, database.with_name(database.name + ".wal")):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        self.store_bytes.set(total)
        return generate_latest(self.registry)

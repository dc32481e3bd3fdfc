"""The collector's own metrics, on a registry of their own. Labels are few and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from pathlib import Path

    from servoscope.exporters.wire import Batch

__all__ = ["CONTENT_TYPE", "Telemetry"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "servoscope_collector"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Telemetry:
    """Counters of one collector process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, registry=self.registry, buckets=_SECONDS)

        self.batches = counter(
            "batches_total",
            "Batches by result: stored, duplicate, refused, busy, failed.",
            "result",
        )
        self.records = counter(
            "records_total", "Rows of stored batches by result: stored, refused.", "result"
        )
        self.refused_values = counter(
            "refused_values_total", "Measurements that were replaced by nothing."
        )
        self.unknown_columns = counter(
            "unknown_columns_total", "Columns of stored batches that nobody here knows."
        )
        self.questions = counter(
            "questions_total", "Questions by result: answered, busy, failed.", "result"
        )
        self.expired_records = counter(
            "expired_records_total", "Records deleted by retention, by reason: age, size.", "reason"
        )
        self.pending = gauge("pending_batches", "Batches received and not yet stored.")
        self.store_bytes = gauge("store_bytes", "Size of the database files.")
        self.up = gauge("store_up", "1 while the last write succeeded, else 0.")
        self.decode_seconds = seconds("decode_seconds", "Time to decode and judge one batch.")
        self.insert_seconds = seconds("insert_seconds", "Time to store one batch.")
        for result in ("stored", "duplicate", "refused", "busy", "failed"):
            self.batches.labels(result)  # a series from the start: rate() sees the first one
        for result in ("stored", "refused"):
            self.records.labels(result)
        for result in ("answered", "busy", "failed"):
            self.questions.labels(result)
        for reason in ("age", "size"):
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

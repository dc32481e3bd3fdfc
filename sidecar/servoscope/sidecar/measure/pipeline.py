"""From a source's record to numbers: complete it, refuse what cannot be, classify, count, pass on.

One bad record never stops the next one, and never a source: what cannot be counted is itself
counted. No I/O: the queue to the collector is a callable that must not block.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servoscope.exporters.records import RequestRecord

if TYPE_CHECKING:
    from servoscope.sidecar.measure.aggregate import Aggregate
    from servoscope.sidecar.measure.classify import Classifier

__all__ = ["Identity", "Pipeline"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What attach found out; sources fill in only what differs from it (a LoRA's model name)."""

    engine: str
    server: str
    model_name: str
    model_version: str
    gpu_model: str


class Pipeline:
    """``take`` is the sink of the source in force."""

    def __init__(
        self,
        aggregate: Aggregate,
        classifier: Classifier,
        identity: Identity,
        *,
        clock: Callable[[], float],
        push: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._aggregate = aggregate
        self._classifier = classifier
        self._clock = clock
        self._push = push
        self.identity = identity
        self.taken = 0
        self.refused: Counter[tuple[str, str]] = Counter()  # (source, field)
        self.probe_claims = 0  # requests whose client said ``probe`` and was not believed
        self.failed: Counter[str] = Counter()  # source -> records that could not be counted

    def take(self, record: RequestRecord) -> None:
        """Count one finished request. Never raises."""
        try:
            self._take(record)
        except Exception:
            # A source must go on whatever one record holds; the type checker cannot promise that.
            source = getattr(record, "source", "unknown")
            self.failed[str(source)] += 1
            if self.failed[str(source)] == 1:
                log.exception("a record of %s could not be counted", source)

    def _take(self, record: RequestRecord) -> None:
        identity = self.identity
        record.engine = identity.engine
        record.server = identity.server
        if record.model_name in ("", "unknown"):
            record.model_name = identity.model_name
        if record.model_version in ("", "unknown"):
            record.model_version = identity.model_version
        if record.gpu_model in ("", "none"):
            record.gpu_model = identity.gpu_model
        for refused in record.refuse_impossible(self._clock()):
            self.refused[record.source.value, refused.name] += 1
        if record.output_tokens is not None and record.output_tokens < 2:
            record.time_per_output_token_seconds = None
        record.request_type = self._classifier.classify(record)
        if self._classifier.claims_probe(record):
            self.probe_claims += 1
        self._aggregate.observe(record)
        self.taken += 1
        if self._push is not None:
            self._push(record)

"""vLLM's /metrics text → :class:`EngineSample`. Pure; one parser an engine."""

from __future__ import annotations

import dataclasses

from servoscope.exporters.exposition import TextParser
from servoscope.exporters.mapping import Mapper
from servoscope.exporters.records import EngineSample, Reading, Refused
from servoscope.exporters.table import Labels
from servoscope.exporters.vllm.names import TABLE

__all__ = ["Parser"]


class Parser:
    """Reads the texts of one vLLM server, of any version from 0.8.5 on.

    Ranks stay apart (label ``rank``): sum counters and ``running``/``waiting`` over them with
    ``EngineSample.total``, take the largest ``kv_usage_ratio`` with ``EngineSample.peak``.
    """

    engine = TABLE.engine

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self._text = TextParser()
        self._mapper = Mapper(TABLE, version)

    def parse(self, text: str | bytes) -> EngineSample:
        """Read one whole text. Never raises for what is in it."""
        return _without_impossible_hits(self._mapper.sample(self._text.parse(text)))


def _without_impossible_hits(sample: EngineSample) -> EngineSample:
    """Refuse hits of the prefix cache where a rank found more tokens than it looked up.

    Preemption and retries inflated the hits of some versions (known fault 12); a hit rate above
    1 is no hit rate.
    """
    queries = {r.labels: r.value for r in sample.readings if r.name == "kv_query_tokens_total"}
    hits: dict[Labels, float] = {}
    for reading in sample.readings:
        if reading.name == "kv_hit_tokens_total":
            key = _without_tier(reading)
            hits[key] = hits.get(key, 0.0) + reading.value
    wrong = {key for key, value in hits.items() if key in queries and value > queries[key]}
    if not wrong:
        return sample
    refused = tuple(
        Refused("kv_hit_tokens_total", repr(hits[key]), f"more than the {queries[key]:g} queries")
        for key in sorted(wrong)
    )
    kept = tuple(
        r
        for r in sample.readings
        if r.name != "kv_hit_tokens_total" or _without_tier(r) not in wrong
    )
    return dataclasses.replace(sample, readings=kept, refused=sample.refused + refused)


def _without_tier(reading: Reading) -> Labels:
    return tuple(pair for pair in reading.labels if pair[0] != "kv_tier")

"""vLLM's /metrics text → :class:`EngineSample`. Pure; one parser an engine."""

from __future__ import annotations

import dataclasses

from servoscope.exporters.exposition import TextParser
from servoscope.exporters.mapping import Mapper
from servoscope.exporters.records import EngineSample, Reading, Refused
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
    """Refuse hits where a rank found more tokens in one tier than it looked up at all.

    Preemption and retries inflated the hits of some versions (known fault 12), and a hit rate
    above 1 is no hit rate. Tiers are judged one by one: versions differ in whether the lookups
    of preempted requests are counted in each.
    """
    queries = {r.labels: r.value for r in sample.readings if r.name == "kv_query_tokens_total"}
    kept: list[Reading] = []
    refused: list[Refused] = []
    for reading in sample.readings:
        if reading.name == "kv_hit_tokens_total":
            most = queries.get(tuple(pair for pair in reading.labels if pair[0] != "kv_tier"))
            if most is not None and reading.value > most:
                why = f"more hits than the {most:g} queries"
                refused.append(Refused(reading.name, repr(reading.value), why))
                continue
        kept.append(reading)
    if not refused:
        return sample
    return dataclasses.replace(sample, readings=tuple(kept), refused=(*sample.refused, *refused))

"""llama.cpp server's /metrics text → :class:`EngineSample`. Pure; one parser a server.

The response header ``Process-Start-Time-Unix`` is not Unix time (1956702555 was seen in 2026):
take the start of the process from /proc (``cpu.start_unix_seconds``), never from it.
"""

from __future__ import annotations

from servoscope.exporters.exposition import TextParser
from servoscope.exporters.llamacpp.names import TABLE
from servoscope.exporters.mapping import Mapper
from servoscope.exporters.records import EngineSample

__all__ = ["Parser"]


class Parser:
    """Reads the texts of one llama.cpp server. There are no ranks and no model label."""

    engine = TABLE.engine

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self._text = TextParser()
        self._mapper = Mapper(TABLE, version)

    def parse(self, text: str | bytes) -> EngineSample:
        """Read one whole text. Never raises for what is in it."""
        return self._mapper.sample(self._text.parse(text))

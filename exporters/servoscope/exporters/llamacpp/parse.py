"""llama.cpp server's /metrics text → :class:`EngineSample`. Pure; one parser a server.

The response header ``Process-Start-Time-Unix`` is not Unix time (1956702555 was seen in 2026):
take the start of the process from /proc (``cpu.start_unix_seconds``), never from it.
"""

from __future__ import annotations

from servoscope.exporters.llamacpp.names import TABLE
from servoscope.exporters.mapping import TableParser

__all__ = ["Parser"]


class Parser(TableParser):
    """Reads the texts of one llama.cpp server. There are no ranks and no model label."""

    table = TABLE

"""vLLM's /metrics text → :class:`EngineSample`. Pure; one parser an engine."""

from __future__ import annotations

from servoscope.exporters.mapping import TableParser
from servoscope.exporters.vllm.names import TABLE

__all__ = ["Parser"]


class Parser(TableParser):
    """Reads the texts of one vLLM server, of any version from 0.7.3 on. A rank is a DP rank."""

    table = TABLE

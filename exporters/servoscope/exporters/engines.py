"""Which engines can be read, and by what: an explicit table, no registration at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from servoscope.exporters.llamacpp.parse import Parser as LlamaCppParser
from servoscope.exporters.records import EngineSample
from servoscope.exporters.sglang.parse import Parser as SglangParser
from servoscope.exporters.table import Table
from servoscope.exporters.vllm.parse import Parser as VllmParser

__all__ = ["ENGINES", "EngineParser", "UnknownEngineError", "parser_for"]


class EngineParser(Protocol):
    """Reads the metrics texts of one engine, one after the other. Not for two threads."""

    table: ClassVar[Table]
    version: str | None

    def parse(self, text: str | bytes) -> EngineSample:
        """Read one whole text. Never raises for what is in it."""
        ...


class UnknownEngineError(ValueError):
    """An engine kind that no exporter knows; the text lists those that are known."""


_PARSERS: dict[str, Callable[[str | None], EngineParser]] = {
    "vllm": VllmParser,
    "sglang": SglangParser,
    "llamacpp": LlamaCppParser,
}

ENGINES: tuple[str, ...] = tuple(_PARSERS)


def parser_for(engine: str, version: str | None) -> EngineParser:
    """A new parser for one server of this kind. Raises UnknownEngineError for other kinds."""
    try:
        return _PARSERS[engine](version)
    except KeyError:
        raise UnknownEngineError(
            f"engine: {engine[:64]!r} cannot be read; known: {', '.join(ENGINES)}"
        ) from None

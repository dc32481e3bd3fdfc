"""Which sources of requests there are for which engine, best first (docs/adr/0002).

What decides the order is what an objective needs: all requests, how each ended, streaming or not,
then the times inside the engine. A source in the engine or of the engine's own hand comes first,
what is seen on the wire next, spans after it (they tell neither streaming nor type), /metrics last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from servoscope.exporters.sglang.settings import Settings
from servoscope.sidecar.attach.sglang import EngineFilesOf
from servoscope.sidecar.relay.descriptors import raise_limit, relay_connections
from servoscope.sidecar.relay.source import RelaySource
from servoscope.sidecar.sources.otlp import OtlpSource
from servoscope.sidecar.sources.request_file import RequestFileSource
from servoscope.sidecar.sources.selection import Candidate, Remembered
from servoscope.sidecar.tap.source import TapSource, tap_missing

if TYPE_CHECKING:
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.config import SidecarConfig
    from servoscope.sidecar.sources.plugin import PluginSource

__all__ = ["Candidates"]

_RIGHT_SECONDS = 10.0  # how long an answer on the right to capture is believed


@dataclass(slots=True)
class Candidates:
    """For one server. ``target`` is the engine as it was found last; ``state`` the state directory.

    ``settings`` tells how an SGLang was started, for whoever else needs it.
    """

    config: SidecarConfig
    target: Callable[[], Target]
    plugin: PluginSource
    state: Path
    settings: Callable[[], Settings] = Settings

    def build(self) -> list[Candidate]:
        """All of them, best first."""
        found: list[Candidate] = []
        engine = self.target().engine
        if engine == "vllm":
            plugin = self.plugin
            found.append(
                Candidate(plugin, plugin.missing, always=True, settled=lambda: plugin.settled)
            )
        spans: OtlpSource | None = None
        if engine == "sglang":
            file, spans = self._sglang()
            if self.config.request_file:
                found.append(
                    Candidate(file, file.missing, always=True, settled=lambda: file.settled)
                )
        if self.config.tap != "off":
            found.append(self._tap())
        if self.config.relay is not None:
            found.append(self._relay())
        if spans is not None:
            found.append(Candidate(spans, spans.missing, always=True))
        return found

    def _sglang(self) -> tuple[RequestFileSource, OtlpSource | None]:
        """The request file, and the spans where they are asked for: they add to it who left."""
        config, files = self.config, EngineFilesOf(self.target)
        self.settings = lambda: files().settings
        spans: OtlpSource | None = None
        file = RequestFileSource(
            files,
            server=self.target().server,
            positions=self.state / "positions",
            allow_text=config.sglang_allow_prompt_text,
            spans=lambda: spans is not None and spans.missing() is None,
        )
        if config.otlp is not None:
            host, port = config.otlp_address()
            spans = OtlpSource(
                host, port, settings=self.settings, allowed_hosts=config.allowed_hosts,
                also=file.left if config.request_file else None,
            )  # fmt: skip
        return file, spans

    def _tap(self) -> Candidate:
        target = self.target()
        tap = TapSource(
            target.host, target.port, interface=self.config.tap_interface, server=target.server
        )
        pid = next(iter(target.pids), None)
        right = Remembered(lambda: tap_missing(target.host, target.port, pid), _RIGHT_SECONDS)
        return Candidate(tap, right)

    def _relay(self) -> Candidate:
        target = self.target()
        host, port = self.config.relay_address()
        relay = RelaySource(
            host, port, target.host, target.port, server=target.server,
            max_connections=relay_connections(raise_limit()),
        )  # fmt: skip
        return Candidate(relay, lambda: None, always=True)

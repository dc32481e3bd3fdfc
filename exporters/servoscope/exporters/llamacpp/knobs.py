"""llama.cpp's knobs, as a sidecar describes them: all of them are settings of the start.

Its server has no endpoint that changes any (``POST /props`` answers ``success`` and does nothing).
The one that can be live is the chunk, on the embedded engine that was started so (``lab.embedded``,
docs/adr/0005-llamacpp-chunk.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from servoscope.exporters.knobs.reading import KnobState, described
from servoscope.exporters.records import Knob

__all__ = ["KNOB_UNITS", "NOT_LIVE", "RESTART_FLAGS", "describe"]

KNOB_UNITS: Mapping[str, str] = MappingProxyType(
    {"chunk_tokens": "tokens", "ubatch_tokens": "tokens", "max_running_requests": "requests"}
)
#: How each is set when the engine has to be restarted for it.
RESTART_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "chunk_tokens": "--batch-size",
        "ubatch_tokens": "--ubatch-size",
        "max_running_requests": "--parallel",
    }
)
NOT_LIVE = (
    "no knob of llamacpp can be set live: it takes its settings at its start; observe only "
    "(chunk_tokens can, on the embedded engine started with --live-chunk)"
)
_SETTING = "llama.cpp takes it at its start"


def describe(states: Sequence[KnobState]) -> list[Knob]:
    """Every knob. Without states what a restart could change."""
    return described(
        states,
        KNOB_UNITS,
        flags=RESTART_FLAGS,
        without=_SETTING,
        live=lambda _name, boot: f"boot value {boot:g} is the ceiling",
    )

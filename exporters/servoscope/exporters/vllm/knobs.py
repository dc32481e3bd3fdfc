"""Sidecar side: vLLM's knobs as the vocabulary's, and what a restart could change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from servoscope.exporters.knobs.reading import KnobState, described
from servoscope.exporters.records import Knob
from servoscope.exporters.vllm.knob_set import KNOB_UNITS

__all__ = ["RESTART_FLAGS", "describe"]

#: How each knob is set when the engine has to be restarted for it.
RESTART_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "chunk_tokens": "--max-num-batched-tokens",
        "long_prefill_threshold_tokens": "--long-prefill-token-threshold",
        "max_running_requests": "--max-num-seqs",
    }
)


def describe(states: Sequence[KnobState]) -> list[Knob]:
    """Every vLLM knob, over all ranks. Without states (no plug-in) what a restart could change."""
    return described(
        states,
        KNOB_UNITS,
        flags=RESTART_FLAGS,
        without="the engine was not started with SERVOSCOPE_KNOBS=1 and the plug-in",
        live=lambda _name, boot: f"boot value {boot:g} is the ceiling",
    )

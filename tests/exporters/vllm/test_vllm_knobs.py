from __future__ import annotations

from servoscope.exporters.records import KnobMode
from servoscope.exporters.vllm.knobs import describe


def test_without_a_plugin_it_says_what_a_restart_could_do() -> None:
    knobs = {k.name: k for k in describe([])}
    assert knobs["chunk_tokens"].mode is KnobMode.RESTART
    assert "--max-num-batched-tokens" in knobs["chunk_tokens"].why
    assert "SERVOSCOPE_KNOBS=1" in knobs["chunk_tokens"].why
    assert knobs["batch_window_seconds"].mode is KnobMode.OBSERVE

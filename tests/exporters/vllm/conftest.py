"""A vLLM process that nothing of ours has been in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servoscope.exporters.plugin.line_server import LineServer
from servoscope.exporters.plugin.sockets import GROUP_VARIABLE
from servoscope.exporters.vllm import plugin


@pytest.fixture
def run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line_servers: list[LineServer]
) -> Iterator[Path]:
    """Of the plug-in, in a clean environment; what it hooked is unhooked after the test."""
    for name in (plugin.DISABLE_VARIABLE, plugin.KNOBS_VARIABLE, GROUP_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path / "run"))
    plugin._FEEDS.clear()
    yield tmp_path / "run"
    for feed in plugin._FEEDS.values():
        if feed is not None:
            feed.hooks.unwrap()  # also FastAPI, which other tests may have loaded
    plugin._FEEDS.clear()
    plugin.__dict__.pop("StatLogger", None)

"""A real SGLang with two tensor-parallel ranks: the harness starts it, nothing is left of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from engines.sglang_capture import FORMS, plan
from engines.sglang_cpu import VERSION, SglangServer
from servoscope.exporters.records import Outcome
from servoscope.lab.client import COMPLETIONS, run_closed


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_two_ranks_serve_and_nothing_is_left() -> None:
    form = FORMS["ranks"]
    requests = [request for request in plan() if request.abort_after_token_events is None]
    with SglangServer(tp=form.tp, args=form.args) as server:
        scratch, pids = server.request_metrics_dir.parent, server.pids()
        titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        assert sum(title.startswith("sglang::scheduler_TP") for title in titles) == form.tp
        assert server.get_json("/server_info")["version"] == VERSION

        observed = asyncio.run(run_closed(server.url, requests, 4))
        assert [o.outcome for o in observed] == [Outcome.LENGTH] * len(requests)
        # One line a request, with the client's numbers and without its text.
        (written,) = server.request_metrics_dir.glob("*.log")
        text = written.read_text()
        assert "import os" not in text
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == len(requests)
        for ours, theirs in {
            "prompt_tokens": "prompt_tokens",
            "output_tokens": "completion_tokens",
            "cached_tokens": "cached_tokens",
        }.items():
            assert sum(getattr(o, ours) for o in observed) == sum(line[theirs] for line in lines)

        # Saved weights: the same prompt has the same answer, cached or not.
        body = {"model": "tiny", "prompt": "import os", "max_tokens": 12, "temperature": 0}
        answers = [server.post_json(COMPLETIONS, body)["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1] != ""
        assert server._tree is not None
        shared = set(server._tree._shared_memory)
        assert shared
    assert [pid for pid in pids if _runs(pid)] == []
    assert not scratch.exists()
    assert [path for path in shared if path.exists()] == []


def _runs(pid: int) -> bool:
    """False for a process that has ended and waits to be read: it has no memory any more."""
    try:
        return Path(f"/proc/{pid}/maps").read_text() != ""
    except OSError:
        return False

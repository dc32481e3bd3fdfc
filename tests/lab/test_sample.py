"""The shipped trace sample: small, whole, licensed, and with every request type early."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from servoscope.lab import sample
from servoscope.lab.replay import Scale, plan_pass
from servoscope.lab.trace import TraceError, TraceRequest, read_trace

FOLDER = files("servoscope.lab") / "traces"


def test_it_is_small_and_says_where_it_is_from() -> None:
    assert len((FOLDER / "sample.jsonl").read_bytes()) <= 60_000
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for words in ("Apache-2.0", "github.com/kvcache-ai/Mooncake", "Cite:", "Changed:"):
        assert words in readme


def test_it_lasts_a_few_minutes_and_shares_prefixes() -> None:
    requests = sample.load_sample()
    assert len(requests) > 500
    assert 120 <= requests[-1].arrival_seconds < sample.SECONDS
    uses = Counter(block for r in requests for block in set(r.prefix or ()))
    assert min(uses.values()) >= 2
    assert sum(len(r.prefix or ()) > 1 for r in requests) > 20


def test_scaled_all_four_types_arrive_within_twenty_seconds() -> None:
    plan = plan_pass(sample.load_sample(), Scale())
    early = Counter(p.request_type for p in plan if p.arrival_seconds < 20)
    assert set(early) == {"chat", "summarise", "generate", "rag"}
    assert min(early.values()) >= 3
    rate = len(plan) / plan[-1].arrival_seconds
    assert 1.0 <= rate <= 3.0
    assert max(len(p.prompt) for p in plan) <= Scale().max_prompt_tokens
    assert max(p.max_tokens for p in plan) <= Scale().max_output_tokens


def test_cutting_keeps_what_is_shared(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, 2000, 10, (0, 1, 2, 3)),
        TraceRequest(1.0, 1500, 20, (0, 1, 9)),
        TraceRequest(2.0, 700, 30, None),
        TraceRequest(5.0, 700, 30, (9,)),
    ]
    kept = list(sample.reduced(requests, 5.0))
    assert [r.prefix for r in kept] == [(0, 1), (0, 1), ()]
    assert [r.output_tokens for r in kept] == [10, 20, 30]
    source, target = tmp_path / "s.csv", tmp_path / "t.jsonl"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    assert sample.main([str(source), str(target)]) == 0
    assert list(read_trace(target)) == [TraceRequest(0.0, 374, 44, ())]


def test_a_damaged_sample_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "SAMPLE", "README.md")
    with pytest.raises(TraceError):
        sample.load_sample()

"""llama.cpp server's metric names, builds of 2024 to b11549: one table. No logic.

Read from a running b11549. /metrics has no labels, exists only with ``--metrics``, and its
counters move at the end of a prompt or a request, not while they run.
"""

from __future__ import annotations

from servoscope.exporters.table import Kind, Line, Ranks, Table

__all__ = ["TABLE"]

_C, _G = Kind.COUNTER, Kind.GAUGE
_SUM, _MAX = Ranks.SUM, Ranks.MAX
_DEVICE = (("kv_tier", "device"),)

LINES: tuple[Line, ...] = (
    Line("requests_processing", "running", _G, _SUM),
    Line("requests_deferred", "waiting", _G, _SUM),
    Line("kv_cache_usage_ratio", "kv_usage_ratio", _G, _MAX, until="b11549"),
    # prompt_tokens leaves the cached ones out: the whole prompt is the sum of both.
    Line("prompt_tokens", "engine_prompt_tokens_total", _C, _SUM, addends=2),
    Line("prompt_tokens_cached", "engine_prompt_tokens_total", _C, _SUM, addends=2),
    Line("prompt_tokens", "kv_query_tokens_total", _C, _SUM, addends=2),
    Line("prompt_tokens_cached", "kv_query_tokens_total", _C, _SUM, addends=2),
    Line("prompt_tokens_cached", "kv_hit_tokens_total", _C, _SUM, labels=_DEVICE),
    Line("tokens_predicted", "engine_generated_tokens_total", _C, _SUM),
    Line("spec_decode_num_draft_tokens", "spec_draft_tokens_total", _C, _SUM),
    Line("spec_decode_num_accepted_tokens", "spec_accepted_tokens_total", _C, _SUM),
)

NOT_USED = frozenset({
    # These two look like counters of tokens a second; they are windows that EVERY scrape of
    # anybody resets (seen: 3831.91, then 0): two readers steal from each other.
    "prompt_tokens_seconds", "predicted_tokens_seconds",
    "prompt_seconds", "tokens_predicted_seconds", "n_decode", "n_tokens_max",
    "n_busy_slots_per_decode", "spec_decode_num_drafts",
    "spec_decode_num_accepted_tokens_per_pos", "kv_cache_tokens",
})  # fmt: skip

CORE = (
    "running",
    "waiting",
    "kv_usage_ratio",
    "kv_query_tokens_total",
    "kv_hit_tokens_total",
    "preemptions_total",
    "engine_prompt_tokens_total",
    "engine_generated_tokens_total",
    "engine_requests_total",
    "reported_time_to_first_token_seconds",
    "reported_time_per_output_token_seconds",
    "reported_inter_token_latency_seconds",
    "reported_queue_seconds",
    "reported_e2e_seconds",
)

TABLE = Table(
    engine="llamacpp",
    prefixes=("llamacpp:", "llamacpp_"),
    lines=LINES,
    not_used=NOT_USED,
    core=CORE,
)

"""llama.cpp server's metric names, builds of 2024 to b11549: one table. No logic.

Read from a running b11549. /metrics has no labels, exists only with ``--metrics``, and its
counters of tokens move at the end of a prompt or a request, not while they run. What has a name
that promises more than it holds is in ``NOT_BELIEVED``, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from servoscope.exporters.table import Kind, Line, Ranks, Table

__all__ = ["NOT_BELIEVED", "TABLE"]

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
    # These two move when a prompt or a request has ended (fault 21); the steps move meanwhile.
    Line("tokens_predicted", "engine_generated_tokens_total", _C, _SUM),
    Line("n_decode", "scheduler_steps_total", _C, _SUM),
    Line("spec_decode_num_draft_tokens", "spec_draft_tokens_total", _C, _SUM),
    Line("spec_decode_num_accepted_tokens", "spec_accepted_tokens_total", _C, _SUM),
)

#: Known, and not what the name says. docs/engines.md has these for people.
NOT_BELIEVED: Mapping[str, str] = {
    "prompt_tokens_seconds": (
        "the throughput since anybody's last scrape: each scrape sets it to 0 (seen: 3831.91, then"
        " 0 a moment later), so that two readers take it from each other"
    ),
    "predicted_tokens_seconds": (
        "the same window for generated tokens; 0 throughout a long answer, because its tokens are"
        " counted when it has ended"
    ),
    "prompt_seconds": (
        "not a sum over requests: prompts that are computed in the same step share its time (seen:"
        " 7.9 s where the prompt_ms of 200 answers add up to 9.4 s)"
    ),
    "n_tokens_max": "declared a counter; it is the longest sequence seen since the start",
    "n_busy_slots_per_decode": (
        "an average over all steps since the start, not the load: it stands still while the server"
        " idles"
    ),
    "kv_cache_tokens": "tokens in the cache, those of finished requests too, until overwritten",
}

_NOT_USED = frozenset({
    "tokens_predicted_seconds", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos",
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
    not_used=_NOT_USED | frozenset(NOT_BELIEVED),
    core=CORE,
)

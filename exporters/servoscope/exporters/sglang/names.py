"""SGLang's metric names, 0.3.6 to 0.5.23: one table. No logic.

Read from the sources of 0.3.6, 0.4.3, 0.4.6, 0.4.9, 0.5.3, 0.5.6.post2, 0.5.9, 0.5.12, 0.5.16 and
0.5.23 and from a running 0.5.23: ``since`` and ``until`` are versions of that list. Which process
says what: see ``parse.py``.
"""

from __future__ import annotations

from servoscope.exporters.table import RAY_LABELS, Kind, Line, Ranks, Table

__all__ = ["TABLE"]

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_SUM, _MAX = Ranks.SUM, Ranks.MAX
#: With priority scheduling (0.5.12) the gauges of queues hold the total under priority="" and
#: its parts under each priority. Counters hold only the parts, so there they are summed.
_TOTAL = (("priority", ""),)

LINES: tuple[Line, ...] = (
    Line("num_running_reqs", "running", _G, _SUM, whole=_TOTAL),
    # The scheduler's queue. Grammars being compiled and, in a server of one role (prefill or
    # decode), the bootstrap, preallocation and transfer queues are counted apart by SGLang.
    Line("num_queue_reqs", "waiting", _G, _SUM, whole=_TOTAL),
    # token_usage is the fullest of the full-attention, sliding-window and state pools, rounded to
    # hundredths (known fault 14): only the first is what prefixes and contexts live in.
    Line("full_token_usage", "kv_usage_ratio", _G, _MAX, since="0.5.12"),
    Line("token_usage", "kv_usage_ratio", _G, _MAX, preference=1),
    # Tokens looked up = computed + found, without what a retraction made it do twice.
    Line("prefill_effective_tokens", "kv_query_tokens_total", _C, _SUM, since="0.5.23",
         where=(("mode", ("input", "device_hit", "host_hit", "storage_hit")),)),
    Line("prefill_effective_tokens", "kv_hit_tokens_total", _C, _SUM, since="0.5.23",
         where=(("mode", ("device_hit",)),), labels=(("kv_tier", "device"),)),
    Line("prefill_effective_tokens", "kv_hit_tokens_total", _C, _SUM, since="0.5.23",
         where=(("mode", ("host_hit",)),), labels=(("kv_tier", "host"),)),
    Line("prefill_effective_tokens", "kv_hit_tokens_total", _C, _SUM, since="0.5.23",
         where=(("mode", ("storage_hit",)),), labels=(("kv_tier", "storage"),)),
    # Before 0.5.23: counted when a request has ended. "any" is a hit of no named tier.
    Line("prompt_tokens", "kv_query_tokens_total", _C, _SUM, preference=1),
    Line("cached_tokens", "kv_hit_tokens_total", _C, _SUM, since="0.5.9", preference=1,
         where=(("cache_source", ("device", "host", "storage")),),
         renamed=(("cache_source", "kv_tier"),), after="a hit"),
    Line("cached_tokens", "kv_hit_tokens_total", _C, _SUM, since="0.4.6", preference=1,
         where=(("cache_source", ("", "total")),), labels=(("kv_tier", "any"),), after="a hit"),
    Line("num_retracted_requests", "preemptions_total", _C, _SUM, since="0.5.9",
         after="a retraction"),
    # These two move when a request has ended; progress within a request is the third.
    Line("prompt_tokens", "engine_prompt_tokens_total", _C, _SUM),
    Line("generation_tokens", "engine_generated_tokens_total", _C, _SUM),
    Line("realtime_tokens", "scheduled_tokens_total", _C, _SUM, since="0.5.9",
         where=(("mode", ("prefill_compute", "decode")),)),
    # No reason is given, and a request that its client cancelled is counted as well (fault 2).
    Line("num_requests", "engine_requests_total", _C, _SUM, since="0.4.3"),
    Line("time_to_first_token_seconds", "reported_time_to_first_token_seconds", _H, _SUM),
    Line("request_time_per_output_token_seconds", "reported_time_per_output_token_seconds", _H,
         _SUM, since="0.5.23"),
    # A chunk of n tokens counts n times, each a n-th of the gap: several tokens a chunk are smooth.
    Line("inter_token_latency_seconds", "reported_inter_token_latency_seconds", _H, _SUM,
         since="0.4.6", after="an answer of two chunks"),
    Line("queue_time_seconds", "reported_queue_seconds", _H, _SUM, since="0.5.3"),
    Line("e2e_request_latency_seconds", "reported_e2e_seconds", _H, _SUM),
)  # fmt: skip

NOT_USED = frozenset({
    # Numbers that say something else than their name (known faults 11, 22 and the sources):
    "cache_hit_rate",  # of the last batch alone; a probe sets it to zero
    "utilization", "max_running_requests_under_SLO",  # never computed: always 0, never set
    "fwd_occupancy",  # NaN without a device timer
    "gen_throughput",  # stands still while the engine idles
    "time_per_output_token_seconds",  # 0.3.6, 0.4.3: running means of one request, many times
    "num_aborted_requests",  # abort commands sent; their requests are in num_requests as well
    "num_retracted_reqs",  # of the last batch
    "avg_request_queue_latency",  # of the last batch
    "http_responses", "http_requests", "http_requests_active",  # streams closed early are missing
    "scheduler_process_cpu_seconds",  # the whole process, which spins while it waits
    # requests: told better by per-request sources
    "prompt_tokens_histogram", "generation_tokens_histogram", "uncached_prompt_tokens_histogram",
    "per_stage_req_latency_seconds", "num_so_requests", "num_retractions",
    # queues of one role, of grammars, of sessions
    "num_running_reqs_offline_batch", "num_grammar_queue_reqs", "num_paused_reqs",
    "num_prefill_prealloc_queue_reqs", "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs", "num_prefill_infight_queue_reqs",
    "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs",
    "num_decode_host_receive_queue_reqs", "num_decode_host_receive_reqs",
    "num_decode_deferred_kv_release_reqs", "decode_deferred_kv_release",
    "decode_deferred_kv_release_seconds", "num_prefill_retries", "num_bootstrap_failed_reqs",
    "num_transfer_failed_reqs", "pending_prealloc_token_usage", "prealloc_full_token_usage",
    "prealloc_swa_token_usage", "num_streaming_sessions", "streaming_session_held_tokens",
    "num_unique_running_routing_keys", "routing_key_running_req_count",
    "routing_key_all_req_count", "routing_keys_active",
    # memory and sizes
    "num_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens",
    "swa_token_usage", "swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens",
    "mamba_usage", "mamba_available_tokens", "mamba_evictable_tokens", "mamba_used_tokens",
    "max_total_num_tokens", "max_total_num_tokens_swa", "page_size", "num_pages", "context_len",
    "cache_config_info", "weight_memory_usage_gb", "kv_cache_memory_usage_gb",
    "graph_memory_usage_gb", "startup_available_gpu_memory_gb", "new_token_ratio",
    "decode_sum_seq_lens", "num_retracted_input_tokens", "num_retracted_output_tokens",
    # start-up
    "engine_startup_time", "engine_load_weights_time", "startup_time_seconds",
    "startup_cuda_graph_time_seconds", "startup_latency_breakdown_seconds_max",
    "weight_load_duration_seconds",
    # scheduler and device time
    "scheduler_idle_seconds", "scheduler_stage_seconds", "process_cpu_seconds",
    "forward_execution_seconds", "gpu_execution_seconds", "func_latency_seconds",
    "get_loads_duration_seconds", "is_cuda_graph", "cuda_graph_passes", "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu", "prefill_delayer_outcomes",
    "prefill_delayer_wait_forward_passes", "prefill_delayer_wait_seconds",
    # speculation: rates and lengths of the last report, no counts of tokens
    "spec_accept_length", "spec_accept_rate", "spec_block_accept_length", "spec_cap_length",
    "spec_num_draft_tokens", "spec_num_steps", "spec_verify_calls",
    # grammars
    "grammar_compilation_time_seconds", "grammar_ebnf_size", "grammar_schema_count",
    "grammar_tree_traversal_time_avg", "grammar_tree_traversal_time_max", "num_grammar",
    "num_grammar_aborted", "num_grammar_cache_hit", "num_grammar_timeout",
    # adapters, experts, replicas
    "lora_pool_slots", "lora_pool_slots_used", "lora_pool_utilization", "eplb_balancedness",
    "eplb_gpu_physical_count", "dp_attention_pairs", "dp_attention_steps", "dp_attention_tokens",
    "dp_attention_sync_wait_seconds", "dp_attention_token_imbalance_ratio",
    "dp_cooperation_realtime_tokens", "dp_cooperation_forward_execution_seconds",
    "dp_cooperation_gpu_execution_seconds", "encoder_dp_pending_requests",
    # tiers of the cache and transfers
    "evicted_tokens", "eviction_duration_seconds", "load_back_tokens", "load_back_bytes",
    "load_back_duration_seconds", "hicache_host_used_tokens", "hicache_host_total_tokens",
    "hicache_host_mamba_used_states", "hicache_host_mamba_total_states", "hicache_backup_bytes",
    "hicache_backup_duration_seconds", "hicache_backup_tokens", "hicache_dropped_tokens",
    "hicache_backup_dropped_tokens", "hicache_prefetch_aux_alloc_failed_tokens",
    "backup_bandwidth", "backup_pgs", "backuped_tokens", "prefetch_bandwidth", "prefetch_pgs",
    "prefetched_tokens", "storage_prefetch_deferred_tokens", "storage_prefetch_hit_tokens",
    "storage_prefetch_unfulfilled_tokens", "kv_transfer_alloc_ms", "kv_transfer_bootstrap_ms",
    "kv_transfer_latency_ms", "kv_transfer_speed_gb_s", "kv_transfer_total_mb",
    "failed_session_recoveries",
    # the encoder's own process
    "encoder_cache_entries", "encoder_cache_evictions", "encoder_cache_hit_files",
    "encoder_cache_hit_tokens", "encoder_cache_size_mb", "encoder_cache_total_files",
    "encoder_cache_total_tokens", "encoder_mm_items_per_batch", "encoder_mm_items_per_request",
    "encoder_model_forward_seconds", "encoder_preprocess_seconds", "encoder_queue_wait_seconds",
    "encoder_request_e2e_latency_seconds", "encoder_requests_received", "encoder_requests",
    "encoder_transfer_seconds",
    # servers of image and video models
    "diffusion_generation_batch_size", "diffusion_lora_active_adapters",
    "diffusion_lora_active_modules", "diffusion_lora_loaded_adapters",
    "diffusion_lora_module_active", "diffusion_num_queue_reqs", "diffusion_num_running_reqs",
    "diffusion_queue_time_seconds", "diffusion_request_latency_seconds", "diffusion_requests",
    "diffusion_stage_host_latency_seconds",
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
    engine="sglang",
    # A colon on the wire of every version that was read; gateways and OpenTelemetry write "_".
    prefixes=("sglang:", "sglang_", "ray_sglang:", "ray_sglang_"),
    lines=LINES,
    not_used=NOT_USED,
    core=CORE,
    rank_label="dp_rank",
    mirror_labels=frozenset({"tp_rank", "pp_rank", "moe_ep_rank"}),
    kept_labels=("model_name",),
    renamed_labels=(("name", "model_name"),),  # before 0.3.6
    # tenant, request_type: the custom labels that docs/guides/attach.md has SGLang started with.
    ignored_labels=RAY_LABELS
    | {"engine_type", "is_streaming", "priority", "request_type", "tenant", "worker_addr"},
    not_used_series=frozenset({("realtime_tokens", "mode", "prefill_cache")}),
)

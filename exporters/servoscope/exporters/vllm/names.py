"""vLLM's metric names, 0.7.3 to 0.33.0: one table. No logic.

Read from the sources of 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.11.0, 0.12.0, 0.13.0, 0.16.0, 0.18.0,
0.20.2, 0.25.0, 0.33.0: ``since`` and ``until`` are versions of that list. Compared with running
ones: 0.9.2, 0.10.2, 0.11.0, 0.11.2, 0.12.0, 0.13.0, 0.16.0, 0.18.1, 0.20.2, 0.22.1, 0.25.1,
0.28.0, 0.32.0.
Names of what only some set-ups have (KV connectors, offloading) are from 0.32.0.
"""

from __future__ import annotations

from servoscope.exporters.table import RAY_LABELS, Kind, Line, Ranks, Table

__all__ = ["TABLE"]

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_SUM, _MAX = Ranks.SUM, Ranks.MAX
_DEVICE = (("kv_tier", "device"),)
_EXTERNAL = (("kv_tier", "external"),)
_REASON = (("finished_reason", "finish_reason"),)

LINES: tuple[Line, ...] = (
    Line("num_requests_running", "running", _G, _SUM),
    Line("num_requests_waiting", "waiting", _G, _SUM),
    Line("kv_cache_usage_perc", "kv_usage_ratio", _G, _MAX, since="0.9.2"),
    Line("gpu_cache_usage_perc", "kv_usage_ratio", _G, _MAX, until="0.12.0", preference=1),
    Line("prefix_cache_queries", "kv_query_tokens_total", _C, _SUM, since="0.9.2"),
    Line("gpu_prefix_cache_queries", "kv_query_tokens_total", _C, _SUM, until="0.12.0",
         preference=1),
    Line("prefix_cache_hits", "kv_hit_tokens_total", _C, _SUM, since="0.9.2", labels=_DEVICE),
    Line("gpu_prefix_cache_hits", "kv_hit_tokens_total", _C, _SUM, until="0.12.0", labels=_DEVICE,
         preference=1),
    Line("external_prefix_cache_hits", "kv_hit_tokens_total", _C, _SUM, since="0.12.0",
         labels=_EXTERNAL),
    Line("num_preemptions", "preemptions_total", _C, _SUM),
    Line("spec_decode_num_draft_tokens", "spec_draft_tokens_total", _C, _SUM),
    Line("spec_decode_num_accepted_tokens", "spec_accepted_tokens_total", _C, _SUM),
    # Every prompt token, cached or not (HELP says "prefill tokens processed").
    Line("prompt_tokens", "engine_prompt_tokens_total", _C, _SUM),
    Line("generation_tokens", "engine_generated_tokens_total", _C, _SUM),
    Line("request_success", "engine_requests_total", _C, _SUM, renamed=_REASON),
    Line("time_to_first_token_seconds", "reported_time_to_first_token_seconds", _H, _SUM),
    # A mean a request. Includes 0 for one-token answers (known fault 6).
    Line("request_time_per_output_token_seconds", "reported_time_per_output_token_seconds", _H,
         _SUM, since="0.11.0"),
    # A gap a token: until 0.13 also under a name that promised the mean.
    Line("inter_token_latency_seconds", "reported_inter_token_latency_seconds", _H, _SUM,
         since="0.10.2"),
    Line("time_per_output_token_seconds", "reported_inter_token_latency_seconds", _H, _SUM,
         until="0.16.0", preference=1),
    Line("request_queue_time_seconds", "reported_queue_seconds", _H, _SUM),
    Line("e2e_request_latency_seconds", "reported_e2e_seconds", _H, _SUM),
)  # fmt: skip

NOT_USED = frozenset({
    # requests: told better by per-request sources
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_n", "request_params_max_tokens", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    # engine
    "num_requests_waiting_by_reason", "num_requests_kv_fetch_by_stage", "engine_sleep_state",
    "cache_config_info", "lora_requests_info", "iteration_tokens", "corrupted_requests",
    "watermark_requests", "admission_rejections", "tool_call_parser_invocations",
    "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu",
    "sleep_mode_operation_duration_seconds", "sleep_mode_operations_in_flight",
    "rl_weight_update_operation_duration_seconds", "rl_weight_update_operations_in_flight",
    "websocket_connection_duration_seconds", "websocket_connections_active",
    "websocket_connections",
    # caches: the two prefix-cache counters say the same, and say it since 0.8.5
    "external_prefix_cache_queries", "mm_cache_queries", "mm_cache_hits", "prompt_tokens_by_source",
    "prompt_tokens_cached", "prompt_tokens_cached_by_source", "prompt_tokens_recomputed",
    "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
    # speculation and diffusion
    "spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos",
    "diffusion_num_canvas_positions", "diffusion_num_committed_tokens",
    "diffusion_num_denoising_steps",
    # KV connectors and offloading
    "simple_kv_offload_info", "simple_kv_offload_load_blocks", "simple_kv_offload_used_blocks",
    "simple_kv_offload_pending_store_blocks", "simple_kv_offload_save_outcomes",
    "kv_offload_allocation_failure", "kv_offload_cpu_allocation_size",
    "kv_offload_cpu_cache_usage_perc", "kv_offload_cpu_cache_read_usage_perc",
    "kv_offload_cpu_cache_write_usage_perc", "kv_offload_load_bytes", "kv_offload_load_size",
    "kv_offload_load_time", "kv_offload_store_bytes", "kv_offload_store_size",
    "kv_offload_store_time", "kv_offload_stores_skipped", "kv_offload_size",
    "kv_offload_total_bytes", "kv_offload_total_time", "kv_offload_lookup_async_delay_seconds",
    "kv_offload_lookup_sync_delay_seconds", "kv_offload_tiering_active_cascade_jobs",
    "kv_offload_tiering_active_promotion_jobs", "kv_offload_tiering_backpressure_blocks_dropped",
    "kv_offload_tiering_backpressure_store_latency_ema",
    "kv_offload_tiering_backpressure_stores_dropped", "kv_offload_tiering_cascade_job_failures",
    "kv_offload_tiering_chunk_hits", "kv_offload_tiering_chunk_queries",
    "kv_offload_tiering_lookup_async_delay_seconds",
    "kv_offload_tiering_lookup_sync_delay_seconds",
    "kv_offload_tiering_primary_read_usage_perc", "kv_offload_tiering_primary_write_usage_perc",
    "kv_offload_tiering_promotion_allocation_failures",
    "kv_offload_tiering_promotion_job_failures", "kv_offload_tiering_read_bytes",
    "kv_offload_tiering_read_time", "kv_offload_tiering_write_bytes",
    "kv_offload_tiering_write_time", "nixl_bytes_transferred", "nixl_num_descriptors",
    "nixl_num_failed_notifications", "nixl_num_failed_transfers", "nixl_num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry", "nixl_post_time_seconds", "nixl_xfer_time_seconds",
    "mooncake_store_operation", "mooncake_store_operation_bytes",
    "mooncake_store_operation_failed_keys", "mooncake_store_operation_keys",
    "mooncake_store_operation_time_seconds", "hf3fs_load_duration_seconds",
    "hf3fs_save_duration_seconds", "hf3fs_num_failed_load", "hf3fs_num_failed_save",
    "hisparse_cache_hits", "hisparse_cache_misses", "hisparse_host_to_device_bytes",
    "hisparse_host_cache_usage_perc", "hisparse_pending_page_transfers",
    "hisparse_host_block_lifetime_seconds", "hisparse_host_block_idle_before_evict_seconds",
    "hisparse_host_block_reuse_gap_seconds",
    # engine V0 (to 0.10): rates over a window of its own, and milliseconds
    "num_requests_swapped", "cpu_cache_usage_perc", "gpu_prefix_cache_hit_rate",
    "cpu_prefix_cache_hit_rate", "time_in_queue_requests", "tokens",
    "avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s",
    "model_forward_time_milliseconds", "model_execute_time_milliseconds",
    "spec_decode_draft_acceptance_rate", "spec_decode_efficiency",
    "spec_decode_num_emitted_tokens",
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
    engine="vllm",
    # Ray writes its own prefix, and since 2.5x replaces the colon.
    prefixes=("vllm:", "vllm_", "ray_vllm:", "ray_vllm_"),
    lines=LINES,
    not_used=NOT_USED,
    core=CORE,
    rank_label="engine",
    kept_labels=("model_name",),
    ignored_labels=RAY_LABELS,
)

"""Every metric that Servoscope publishes: the only place that states name, kind, unit, labels.

``publish`` writes nothing that is not here, rules and dashboards are built from these names, and
docs/metrics.md is generated from this table. Metrics whose part is not built yet carry
``since=None`` so that rules may already name them; they are listed as planned in the docs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "CATALOG",
    "FLEET",
    "INF",
    "LATENCY_BUCKETS_SECONDS",
    "PREFIX",
    "SLICE",
    "TENANT_SLICE",
    "TOKEN_BUCKETS",
    "Kind",
    "Metric",
    "metric",
    "render_markdown",
]

PREFIX = "servoscope_"
INF = float("inf")

#: ONE grid for every server of a fleet: histograms with unlike edges cannot be added (contracts).
LATENCY_BUCKETS_SECONDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
TOKEN_BUCKETS: tuple[float, ...] = tuple(float(2**k) for k in range(21))  # 1 .. 1,048,576

#: Labels of a full histogram. No tenant here: that would multiply 600 series by every tenant.
SLICE: tuple[str, ...] = (
    "engine", "server", "model_name", "model_version", "request_type", "gpu_model", "streaming",
    "source",
)  # fmt: skip
TENANT_SLICE: tuple[str, ...] = (*SLICE, "tenant")
FLEET: tuple[str, ...] = ("engine", "server", "model_name", "model_version", "gpu_model")
_SERVER = ("engine", "server")


class Kind(StrEnum):
    """Prometheus metric types that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the catalogue. ``name`` is without ``servoscope_``; counters end in _total."""

    name: str
    kind: Kind
    unit: str  # "seconds", "tokens", "bytes", "ratio" (0..1), "1" for counts and states
    labels: tuple[str, ...]
    help: str
    part: str  # request, slo, engine, gpu, control, drift, self, collector
    since: str | None = "0.1.0"  # None: reserved, not published yet

    @property
    def full_name(self) -> str:
        """The name on /metrics."""
        return PREFIX + self.name

    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper edges without +Inf; empty unless a histogram."""
        if self.kind is not Kind.HISTOGRAM:
            return ()
        return LATENCY_BUCKETS_SECONDS if self.unit == "seconds" else TOKEN_BUCKETS


def _m(  # noqa: PLR0917 - the columns of the table below
    part: str,
    kind: Kind,
    name: str,
    unit: str,
    labels: tuple[str, ...],
    help_: str,
    since: str | None = "0.1.0",
) -> Metric:
    return Metric(
        name=name, kind=kind, unit=unit, labels=labels, help=help_, part=part, since=since
    )


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

CATALOG: tuple[Metric, ...] = (
    # ---- request -------------------------------------------------------------------------------
    _m("request", _H, "time_to_first_token_seconds", "seconds", SLICE,
       "From the request received to its first generated token."),
    _m("request", _H, "time_to_first_answer_seconds", "seconds", SLICE,
       "From the request received to its first token that is not reasoning.", None),
    _m("request", _H, "time_per_output_token_seconds", "seconds", SLICE,
       "(last token - first token) / (output tokens - 1), for two output tokens or more."),
    _m("request", _H, "inter_token_latency_seconds", "seconds", SLICE,
       "Gap between consecutive token events of one request."),
    _m("request", _H, "queue_seconds", "seconds", SLICE,
       "From the request received to its first scheduling."),
    _m("request", _H, "prefill_seconds", "seconds", SLICE,
       "From first scheduling to the first generated token."),
    _m("request", _H, "decode_seconds", "seconds", SLICE,
       "From the first to the last generated token."),
    _m("request", _H, "e2e_seconds", "seconds", SLICE,
       "From the request received to its end, of requests served in full (completed, length)."),
    _m("request", _H, "prompt_tokens", "tokens", SLICE, "Prompt length of finished requests."),
    _m("request", _H, "output_tokens", "tokens", SLICE, "Generated tokens of finished requests."),
    _m("request", _H, "cached_tokens", "tokens", SLICE,
       "Prompt tokens served from the prefix cache, a request."),
    _m("request", _C, "requests_total", "1", (*SLICE, "outcome", "phase"),
       "Finished requests by outcome and by the phase in which they ended."),
    _m("request", _G, "requests_in_flight", "1",
       ("engine", "server", "model_name", "model_version", "gpu_model", "request_type", "phase"),
       "Requests that have been received and have not ended."),
    _m("request", _C, "goodput_requests_total", "1", SLICE,
       "Finished requests that met every objective that counts them."),
    _m("request", _C, "goodput_tokens_total", "tokens", SLICE,
       "Generated tokens of requests that met every objective that counts them."),
    _m("request", _C, "throughput_tokens_total", "tokens", SLICE,
       "Generated tokens of all finished requests, good or not."),
    # ---- slo -----------------------------------------------------------------------------------
    _m("slo", _C, "slo_total", "1", ("service", "objective", *TENANT_SLICE),
       "Requests that an objective counts, classified when they were observed."),
    _m("slo", _C, "slo_good_total", "1", ("service", "objective", *TENANT_SLICE),
       "Requests that met an objective."),
    _m("slo", _C, "slo_over_total", "1", ("service", "objective", "factor", *TENANT_SLICE),
       "Requests above factor times the threshold of an objective."),
    _m("slo", _C, "slo_censored_total", "1", ("service", "objective", *TENANT_SLICE),
       "Requests that ended by the client before an objective could be decided: left out."),
    _m("slo", _G, "slo_threshold_seconds", "seconds", ("service", "objective"),
       "Threshold of a latency objective."),
    _m("slo", _G, "slo_target_ratio", "ratio", ("service", "objective"),
       "Share of requests that must be good."),
    # ---- engine --------------------------------------------------------------------------------
    _m("engine", _G, "engine_up", "1", FLEET, "1 while the engine answers, 0 while it does not."),
    _m("engine", _G, "engine_info", "1", (*FLEET, "version"), "Always 1; labels say what it is."),
    _m("engine", _G, "engine_start_time_seconds", "seconds", _SERVER,
       "When the engine process started, in seconds since the epoch."),
    _m("engine", _C, "engine_restarts_total", "1", _SERVER,
       "Restarts of the engine seen by this sidecar."),
    _m("engine", _G, "running", "1", FLEET, "Requests in the engine's running batch."),
    _m("engine", _G, "waiting", "1", FLEET, "Requests waiting in the engine."),
    _m("engine", _G, "kv_usage_ratio", "ratio", FLEET, "KV cache in use; the fullest rank."),
    _m("engine", _C, "kv_query_tokens_total", "tokens", FLEET,
       "Prompt tokens looked up in the prefix cache."),
    _m("engine", _C, "kv_hit_tokens_total", "tokens", (*FLEET, "kv_tier"),
       "Prompt tokens found in the prefix cache, by tier: device, host, storage, external; any "
       "where the engine does not say."),
    _m("engine", _C, "preemptions_total", "1", FLEET, "Requests preempted by the scheduler."),
    _m("engine", _C, "spec_draft_tokens_total", "tokens", FLEET, "Speculative draft tokens."),
    _m("engine", _C, "spec_accepted_tokens_total", "tokens", FLEET, "Accepted draft tokens."),
    _m("engine", _C, "engine_prompt_tokens_total", "tokens", FLEET,
       "Prompt tokens, as the engine counts them."),
    _m("engine", _C, "engine_generated_tokens_total", "tokens", FLEET,
       "Generated tokens, as the engine counts them: the measure of progress."),
    _m("engine", _C, "engine_requests_total", "1", (*FLEET, "finish_reason"),
       "Finished requests, as the engine counts them."),
    _m("engine", _C, "scheduler_cpu_seconds_total", "seconds", (*FLEET, "rank"),
       "CPU seconds inside the scheduler's schedule(), measured in the engine."),
    _m("engine", _C, "scheduler_steps_total", "1", (*FLEET, "rank"), "Scheduler steps with work."),
    _m("engine", _C, "scheduled_tokens_total", "tokens", (*FLEET, "rank"),
       "Tokens scheduled over all steps."),
    _m("engine", _G, "step_tokens_max", "tokens", (*FLEET, "rank"),
       "Most tokens scheduled in one step since the last read."),
    _m("engine", _C, "plugin_cpu_seconds_total", "seconds", (*FLEET, "rank"),
       "CPU seconds that our own plug-in spent in the scheduler's thread."),
    _m("engine", _C, "engine_process_cpu_seconds_total", "seconds", (*FLEET, "process"),
       "CPU seconds of each engine process. Not scheduler CPU: engines spin while they wait."),
    _m("engine", _G, "engine_process_resident_bytes", "bytes", (*FLEET, "process"),
       "Resident memory of each engine process."),
    _m("engine", _H, "reported_time_to_first_token_seconds", "seconds", (*FLEET, "source"),
       "The engine's own histogram (its edges, its bias), only where no source sees requests."),
    _m("engine", _H, "reported_time_per_output_token_seconds", "seconds", (*FLEET, "source"),
       "The engine's own histogram (its edges, its bias), only where no source sees requests."),
    _m("engine", _H, "reported_inter_token_latency_seconds", "seconds", (*FLEET, "source"),
       "The engine's own histogram (its edges, its bias), only where no source sees requests."),
    _m("engine", _H, "reported_queue_seconds", "seconds", (*FLEET, "source"),
       "The engine's own histogram (its edges, its bias), only where no source sees requests."),
    _m("engine", _H, "reported_e2e_seconds", "seconds", (*FLEET, "source"),
       "The engine's own histogram (its edges, its bias), only where no source sees requests."),
    _m("engine", _H, "kv_transfer_seconds", "seconds", SLICE,
       "KV transfer time of a request served by two engines.", None),
    # ---- gpu -----------------------------------------------------------------------------------
    _m("gpu", _G, "gpu_utilization_ratio", "ratio", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Share of time with a kernel running. 1 with a single request: never page on it alone."),
    _m("gpu", _G, "gpu_memory_used_bytes", "bytes", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Device memory in use."),
    _m("gpu", _G, "gpu_memory_total_bytes", "bytes", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Device memory."),
    _m("gpu", _G, "gpu_power_watts", "watts", (*_SERVER, "gpu_model", "gpu_uuid"), "Power draw."),
    _m("gpu", _G, "gpu_temperature_celsius", "celsius", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Core temperature."),
    _m("gpu", _G, "gpu_sm_clock_hertz", "hertz", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Clock of the streaming multiprocessors."),
    _m("gpu", _G, "gpu_memory_clock_hertz", "hertz", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Memory clock."),
    _m("gpu", _G, "gpu_throttle_reason", "1", (*_SERVER, "gpu_model", "gpu_uuid", "reason"),
       "1 while the reason holds."),
    _m("gpu", _G, "gpu_memory_used_min_bytes", "bytes", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Lowest device memory in use since the last read.", None),
    _m("gpu", _G, "gpu_memory_used_max_bytes", "bytes", (*_SERVER, "gpu_model", "gpu_uuid"),
       "Highest device memory in use since the last read.", None),
    _m("gpu", _C, "gpu_xid_errors_total", "1", (*_SERVER, "gpu_model", "gpu_uuid", "xid"),
       "XID errors.", None),
    _m("gpu", _C, "gpu_ecc_errors_total", "1", (*_SERVER, "gpu_model", "gpu_uuid", "severity"),
       "ECC errors.", None),
    _m("gpu", _C, "gpu_pcie_bytes_total", "bytes", (*_SERVER, "gpu_model", "gpu_uuid", "direction"),
       "Bytes over PCIe.", None),
    _m("gpu", _C, "gpu_nvlink_bytes_total", "bytes",
       (*_SERVER, "gpu_model", "gpu_uuid", "direction"), "Bytes over NVLink.", None),
    # ---- control -------------------------------------------------------------------------------
    _m("control", _G, "knob_value", "1", (*_SERVER, "rank", "knob"), "Knob, as read back."),
    _m("control", _G, "knob_boot_value", "1", (*_SERVER, "rank", "knob"), "Knob at engine start."),
    _m("control", _G, "knob_bound", "1", (*_SERVER, "rank", "knob", "bound"),
       "Bounds of a knob: min, max."),
    _m("control", _G, "knob_mode", "1", (*_SERVER, "knob", "mode"),
       "1 for the mode in force: live, restart, observe."),
    _m("control", _G, "lease_held", "1", _SERVER,
       "1 while this sidecar holds the lease on the engine's knobs."),
    _m("control", _C, "knob_changes_total", "1", (*_SERVER, "knob", "result"),
       "Knob changes asked for, by result: applied, refused, reverted."),
    _m("control", _G, "policy_up", "1", _SERVER,
       "1 while the collector tells its policy, 0 while it does not: then the last one stands."),
    _m("control", _G, "policy_last_success_timestamp_seconds", "seconds", _SERVER,
       "When the collector last told its policy, in seconds since the epoch."),
    _m("control", _C, "policy_errors_total", "1", (*_SERVER, "reason"),
       "Questions for the policy that gave none, by reason."),
    _m("control", _G, "policy_control_mode", "1", (*_SERVER, "mode"),
       "1 for the control mode of the collector's policy."),
    _m("control", _G, "policy_drift_freeze", "1", _SERVER,
       "1 while the collector's policy freezes control because of drift, else 0."),
    _m("control", _G, "policy_slo_mismatch", "1", _SERVER,
       "1 while this sidecar and the collector judge by different objectives, else 0."),
    _m("control", _G, "control_mode", "1", (*_SERVER, "mode"), "1 for the mode in force.", None),
    _m("control", _C, "control_actions_total", "1", (*_SERVER, "knob", "reason"),
       "Actions of the control loop.", None),
    _m("control", _C, "control_rollbacks_total", "1", (*_SERVER, "reason"),
       "Roll-backs of the control loop.", None),
    _m("control", _G, "slo_infeasible", "1", (*_SERVER, "binding"),
       "1 while no knob setting can meet the objective.", None),
    # ---- drift ---------------------------------------------------------------------------------
    _m("drift", _G, "drift_episode_open", "1",
       ("model_name", "model_version", "request_type", "stream", "level"),
       "1 while a drift episode is open.", None),
    _m("drift", _G, "drift_evidence", "1",
       ("model_name", "model_version", "request_type", "stream"), "Evidence of drift.", None),
    # ---- self ----------------------------------------------------------------------------------
    _m("self", _G, "build_info", "1", ("version",), "Always 1."),
    _m("self", _G, "source_up", "1", (*_SERVER, "source"),
       "1 while a source is ok or idle, else 0: plugin, file, tap, relay, otlp, scrape, and loads, "
       "which tells gauges only. Sources that are off have no series."),
    _m("self", _G, "source_state", "1", (*_SERVER, "source", "state"),
       "1 for the state in force: ok, idle, failed, stale, bad_value."),
    _m("self", _G, "source_read_seconds", "seconds", (*_SERVER, "source"),
       "How long the last read took."),
    _m("self", _G, "source_last_success_timestamp_seconds", "seconds", (*_SERVER, "source"),
       "When the source last gave a good reading, in seconds since the epoch."),
    _m("self", _C, "source_errors_total", "1", (*_SERVER, "source", "reason"),
       "Failed reads by reason."),
    _m("self", _C, "source_dropped_total", "1", (*_SERVER, "source", "reason"),
       "Records, lines or packets lost or left out before they could be counted."),
    _m("self", _C, "refused_values_total", "1", (*_SERVER, "source", "field"),
       "Values that were read and not believed."),
    _m("self", _G, "unknown_engine_metrics", "1", _SERVER,
       "Engine metric names that no table line knows."),
    _m("self", _C, "labels_folded_total", "1", (*_SERVER, "label"),
       "Observations whose label value was folded into `other` by the cap."),
    _m("self", _G, "label_values", "1", (*_SERVER, "label"), "Distinct values kept of a label."),
    _m("self", _C, "probe_claims_total", "1", _SERVER,
       "Requests whose client said it was a probe and was not believed."),
    _m("self", _C, "refused_hosts_total", "1", _SERVER,
       "Requests to this sidecar in the name of a host that is not this one's."),
    _m("self", _C, "spool_records_total", "1", (*_SERVER, "result"),
       "Records on the way to disk until the collector has them: written, restored (at a start), "
       "or not kept: full, failed, slow (the disk), old (more than a day)."),
    _m("self", _C, "spool_damaged_lines_total", "1", _SERVER,
       "Lines of the spool that were cut off or spoiled when they were read at a start."),
    _m("self", _G, "spool_bytes", "bytes", _SERVER, "Size of the spool of unsent records."),
    _m("self", _G, "spool_up", "1", _SERVER,
       "1 while unsent records are kept on disk, 0 while they cannot be."),
    _m("self", _C, "pushed_records_total", "1", (*_SERVER, "result"),
       "Records for the collector: accepted, dropped, refused."),
    _m("self", _G, "push_queue_records", "1", _SERVER, "Records waiting for the collector."),
    _m("self", _C, "reconcile_requests_total", "1", (*_SERVER, "side"),
       "Finished requests counted by us and by the engine: side ours, engine."),
    # ---- collector -----------------------------------------------------------------------------
    _m("collector", _C, "collector_batches_total", "1", ("result",),
       "Batches by result: stored, duplicate, refused, busy, failed."),
    _m("collector", _C, "collector_records_total", "1", ("result",),
       "Rows of stored batches by result: stored, refused."),
    _m("collector", _C, "collector_refused_values_total", "1", (),
       "Measurements that were replaced by nothing."),
    _m("collector", _C, "collector_unknown_columns_total", "1", (),
       "Columns of stored batches that nobody here knows."),
    _m("collector", _C, "collector_questions_total", "1", ("result",),
       "Questions by result: answered, busy, failed."),
    _m("collector", _C, "collector_expired_records_total", "1", ("reason",),
       "Records deleted by retention, by reason: age, size, future (their time is not yet)."),
    _m("collector", _C, "collector_refused_hosts_total", "1", (),
       "Requests in the name of a host that is not this one's."),
    _m("collector", _G, "collector_clock_doubtful", "1", (),
       "1 while the clock has jumped and retention waits for it to settle, else 0."),
    _m("collector", _G, "collector_pending_batches", "1", (),
       "Batches received and not yet stored."),
    _m("collector", _G, "collector_store_bytes", "bytes", (), "Size of the database files."),
    _m("collector", _G, "collector_store_up", "1", (),
       "1 while the last write succeeded, else 0."),
    _m("collector", _H, "collector_decode_seconds", "seconds", (),
       "Time to decode and judge one batch."),
    _m("collector", _H, "collector_insert_seconds", "seconds", (), "Time to store one batch."),
)  # fmt: skip

_BY_NAME = {m.name: m for m in CATALOG}


def metric(name: str) -> Metric:
    """The catalogue line of ``name`` (without prefix). Raises KeyError for a name not in it."""
    return _BY_NAME[name]


def render_markdown() -> str:
    """docs/metrics.md, whole."""
    parts: dict[str, list[Metric]] = {}
    for m in CATALOG:
        parts.setdefault(m.part, []).append(m)
    out = [
        "# Metrics",
        "",
        (
            "Generated from `exporters/servoscope/exporters/catalog.py` by `make generate`; "
            "do not edit. All names start with `servoscope_`."
        ),
        "",
        "Latency histograms share one grid of bucket edges (seconds): "
        + ", ".join(f"{b:g}" for b in LATENCY_BUCKETS_SECONDS)
        + ". Token histograms: powers of two from 1 to 1,048,576.",
    ]
    for part, metrics in parts.items():
        out += ["", f"## {part}", "", "| name | kind | unit | labels | meaning |"]
        out += ["|---|---|---|---|---|"]
        for m in metrics:
            labels = ", ".join(m.labels)
            planned = "" if m.since else " *(planned)*"
            out.append(f"| `{m.name}` | {m.kind} | {m.unit} | {labels} | {m.help}{planned} |")
    return "\n".join(out) + "\n"

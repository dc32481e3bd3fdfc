"""What is read of vLLM's scheduler by name: what it must have, limits at boot, values now."""

from __future__ import annotations

from typing import Any

from servoscope.exporters.vllm.knob_set import KnobEnvelope, KnobSet

__all__ = [
    "missing_attributes",
    "rank_of",
    "read_envelope",
    "slots_attribute",
    "values_in_force",
]

#: What the wrapper reads and writes; without these it stays off.
NEEDED = (
    "running",
    "waiting",
    "scheduler_config",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
)


def missing_attributes(scheduler: Any) -> list[str]:
    """What this version's scheduler lacks of what the wrapper needs."""
    missing = [f"scheduler.{name}" for name in NEEDED if not hasattr(scheduler, name)]
    config = getattr(scheduler, "scheduler_config", None)
    if config is not None and not hasattr(config, "long_prefill_token_threshold"):
        missing.append("scheduler_config.long_prefill_token_threshold")
    return missing


def slots_attribute(scheduler: Any) -> str:
    """Which attribute bounds admission: one that is not asserted (0.32), else the one that is."""
    return next(
        (n for n in ("max_num_active_reqs",) if hasattr(scheduler, n)), "max_num_running_reqs"
    )


def read_envelope(scheduler: Any) -> KnobEnvelope:
    """Boot values and limits of a scheduler that has all of NEEDED."""
    config = scheduler.scheduler_config
    chunked = getattr(
        config, "enable_chunked_prefill", getattr(config, "chunked_prefill_enabled", True)
    )
    refused: dict[str, str] = {}
    if not chunked:
        off = "chunked prefill is off: a smaller step would block every longer prompt"
        refused = {"chunk_tokens": off, "long_prefill_threshold_tokens": off}
    elif getattr(config, "disable_chunked_mm_input", False):
        refused["chunk_tokens"] = (
            "--disable-chunked-mm-input: an image that fits into no step would never run"
        )
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    if int(getattr(parallel, "data_parallel_size", 1) or 1) > 1:
        why = "data parallel: a held rank would run dummy batches"
        refused["batch_window_seconds"] = refused["batch_window_min_requests"] = why
    mamba = bool(getattr(scheduler, "need_mamba_block_aligned_split", False))
    return KnobEnvelope(
        boot=KnobSet(
            chunk_tokens=int(scheduler.max_num_scheduled_tokens),
            long_prefill_threshold_tokens=int(config.long_prefill_token_threshold),
            max_running_requests=int(getattr(scheduler, slots_attribute(scheduler))),
        ),
        speculative_tokens=int(getattr(scheduler, "num_spec_tokens", 0) or 0),
        floor_tokens=int(getattr(scheduler, "block_size", 1)) if mamba else 1,
        refused=refused,
    )


def rank_of(scheduler: Any) -> int:
    """Data-parallel rank of this engine core (0 without data parallelism)."""
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        value = getattr(parallel, name, None)
        if isinstance(value, int):
            return value
    return 0


def values_in_force(scheduler: Any) -> dict[str, int]:
    """The scheduler's attributes as they are this moment (they follow at the next step)."""
    config = scheduler.scheduler_config
    return {
        "chunk_tokens": int(scheduler.max_num_scheduled_tokens),
        "long_prefill_threshold_tokens": int(config.long_prefill_token_threshold),
        "max_running_requests": int(getattr(scheduler, slots_attribute(scheduler))),
    }

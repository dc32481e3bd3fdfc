"""What vLLM and its configuration say of themselves, for the first line of a socket (hello)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servoscope.exporters.plugin import facts

__all__ = ["config_values", "hello"]


def model_names(vllm_config: Any) -> list[str]:
    """Names the model is served under, the first one first."""
    model = getattr(vllm_config, "model_config", None)
    served = getattr(model, "served_model_name", None) or getattr(model, "model", None)
    if served is None:
        return []
    return [str(name) for name in served] if isinstance(served, (list, tuple)) else [str(served)]


def config_values(vllm_config: Any) -> dict[str, Any]:
    """Settings at boot that bound or explain what is measured. Only plain values."""
    wanted = {
        "scheduler_config": (
            "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs",
            "max_num_active_seqs", "long_prefill_token_threshold", "enable_chunked_prefill",
            "async_scheduling", "policy",
        ),
        "parallel_config": (
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        ),
        "cache_config": ("block_size", "enable_prefix_caching", "num_gpu_blocks"),
        "model_config": ("max_model_len", "dtype", "revision"),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for section, names in wanted.items():
        part = getattr(vllm_config, section, None)
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                found[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return found


def hello(
    vllm_config: Any,
    *,
    boot_values: Mapping[str, Any],
    missing: list[str],
    rank: int | None,
    off: str,
) -> dict[str, Any]:
    """The first line."""
    return facts.hello(
        "vllm",
        boot_values=boot_values,
        missing=missing,
        rank=rank,
        off=off,
        model_names=model_names(vllm_config),
    )

"""The attention of Intel's extension for PyTorch, as vLLM 0.9 to 0.11 call it on a CPU.

Without it they switch chunked prefill and the prefix cache off. Computed by vllm_ops.py; see
vllm_stubs.py for how it is found.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from vllm_ops import (  # type: ignore[import-not-found,unused-ignore]
    cpu_attention_with_kv_cache,
    cpu_attn_reshape_and_cache,
)

__all__ = ["PagedAttention"]


class PagedAttention:
    """``intel_extension_for_pytorch.llm.modules.PagedAttention``, as 0.9 to 0.11 call it."""

    @staticmethod
    def reshape_and_cache(*args: Any) -> None:
        """New keys and values into their slots."""
        key, value, key_cache, value_cache, slots = args
        cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, "")

    @staticmethod
    def single_query_cached_kv_attention(*args: Any) -> None:
        """One new token a request."""
        out, query, key_cache, value_cache, _, scale, blocks, lengths, _, _, alibi = args
        each = torch.arange(query.shape[0] + 1)
        caches = (key_cache, value_cache)
        cpu_attention_with_kv_cache(
            query, *caches, out, each, lengths, scale, True, alibi, -1, blocks
        )

    @staticmethod
    def flash_attn_varlen_func(*args: Any) -> None:
        """Prompts, or pieces of them, behind what is in the cache."""
        out, query, key_cache, value_cache, starts, key_starts, _, _, *rest = args
        scale, causal, blocks, alibi = rest
        lengths, caches = key_starts.diff(), (key_cache, value_cache)
        cpu_attention_with_kv_cache(
            query, *caches, out, starts, lengths, scale, causal, alibi, -1, blocks
        )

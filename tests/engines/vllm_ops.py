"""vLLM's compiled CPU operators in plain PyTorch, for releases whose own do not load.

A wheel of vLLM carries operators compiled for one release of torch; beside another they do not
load. Imported in their place (see vllm_stubs.py), this module registers those that a small dense
Llama needs on a CPU, as 0.9 to 0.31 call them, with honest results. Everything above them is the
release's own: API server, scheduler, KV blocks, sampler, metrics. Speed is not the compiled ones'.

An operator that is not here raises by name when vLLM asks torch for it, and so does a feature that
is not here (ALiBi, soft cap, sinks, a quantised KV cache).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

__all__ = [
    "OPERATORS",
    "attend",
    "cpu_attention_with_kv_cache",
    "cpu_attn_reshape_and_cache",
    "register",
]

Operator = Callable[..., Any]
Tensor = Any

#: What 0.12 to 0.18 ask of ``torch._C._cpu``, and later torch has in ``torch.cpu`` only.
MOVED = ("_is_amx_tile_supported", "_is_avx512_supported")
#: 0.17 and 0.18 do not start unless this variable names both: they are for speed. The loader skips
#: what is not a file, with a line in the log of a process that starts later.
WANTED_PRELOADED = "libtcmalloc.so libiomp5.so"
#: What get_scheduler_metadata gives is read by the compiled attention only.
METADATA_BYTES = 64

#: Schemas of operators, and what computes them.
OPERATORS: list[tuple[str, Operator]] = []


def operator(*schemas: str) -> Callable[[Operator], Operator]:
    """Registers a function as the operator that a schema describes."""

    def add(work: Operator) -> Operator:
        OPERATORS.extend((schema, work) for schema in schemas)
        return work

    return add


def _refuse(wanted: bool, what: str) -> None:
    if wanted:
        raise NotImplementedError(f"{what} is not in vllm_ops.py")


def _refuse_quantised(kind: str = "auto", *scales: float) -> None:
    _refuse(kind != "auto" or any(scale != 1 for scale in scales), "a quantised KV cache")


@operator("_C::rms_norm(Tensor(a!) out, Tensor input, Tensor? weight, float epsilon) -> ()")
def rms_norm(out: Tensor, source: Tensor, weight: Tensor, epsilon: float) -> None:
    """``source / rms(source) * weight``, in float32 as the compiled one."""
    x = source.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    x = x if weight is None else x * weight.float()
    out.copy_(x.to(out.dtype).view(out.shape))


@operator(
    "_C::fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon)"
    " -> ()"
)
def fused_add_rms_norm(source: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """``residual += source``, then its norm into ``source``."""
    residual.add_(source)
    rms_norm(source, residual, weight, epsilon)


@operator("_C::silu_and_mul(Tensor(a!) out, Tensor input) -> ()")
def silu_and_mul(out: Tensor, source: Tensor) -> None:
    """``silu`` of the first half times the second."""
    first, second = source.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(first) * second)


@operator(
    "_C::rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size,"
    " Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates ``query`` and ``key`` in place; pairs are halves (NeoX) or neighbours."""
    _refuse(rope_dim_offset != 0 or inverse, "rotary_embedding with rope_dim_offset or inverse")
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    rotated = 2 * cos.shape[-1]
    for one in (query, key):
        if one is None:
            continue
        heads = one.view(positions.numel(), -1, head_size)
        x = heads[..., :rotated].float()
        first, second = x.chunk(2, dim=-1) if is_neox else (x[..., ::2], x[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
        heads[..., :rotated] = joined.to(heads.dtype)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, window: int = -1
) -> Tensor:
    """Attention of one request's ``query``, which is at the last of ``key``'s positions.

    ``query`` is tokens x heads x size; ``key`` and ``value`` are KV heads x tokens x size.
    ``window``: how many positions a token sees, itself counted; -1 is all.
    """
    asking, known = query.shape[0], key.shape[1]
    mask = None
    if (causal and asking > 1) or window >= 0:
        own = torch.arange(known - asking, known).unsqueeze(1)
        other = torch.arange(known).unsqueeze(0)
        mask = other <= own if causal else other >= 0
        mask = mask & (other > own - window) if window >= 0 else mask
    found = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[0],
    )
    return found[0].transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """KV heads x ``length`` x size, of blocks x KV heads x block size x size."""
    taken = cache[blocks[: -(-length // cache.shape[2])].long()]
    return taken.transpose(0, 1).flatten(1, 2)[:, :length]


def _scatter(cache: Tensor, what: Tensor, slots: Tensor) -> None:
    """Tokens x KV heads x size into blocks x KV heads x block size x size; slot -1 is none."""
    slots = slots.flatten()[: what.shape[0]].long()
    kept = slots >= 0
    slots, size = slots[kept], cache.shape[2]
    cache[slots // size, :, slots % size] = what[: kept.shape[0]][kept].to(cache.dtype)


@operator(
    "_C::cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0,"
    ' str kv_cache_dtype="auto") -> ()'
)
def cpu_attn_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """New keys and values into their slots. The order within a block is ours, and read by us."""
    _refuse_quantised(kv_cache_dtype, k_scale, v_scale)
    _scatter(key_cache, key, slot_mapping)
    _scatter(value_cache, value, slot_mapping)


@operator(
    "_C::get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim,"
    " Tensor seq_lens, ScalarType dtype, Tensor query_start_loc, bool casual, int window_size,"
    " str isa_hint, bool enable_kv_split, Tensor? dynamic_causal=None) -> Tensor"
)
def get_scheduler_metadata(*_: Any) -> Tensor:
    """How the compiled attention shares its work among threads: nothing here reads it."""
    return torch.zeros(METADATA_BYTES, dtype=torch.uint8)


_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor query_start_loc,"
    " Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes"
)


@operator(
    f"_C::cpu_attention_with_kv_cache({_ATTENTION}, int sliding_window_size, Tensor block_table,"
    " float softcap, Tensor scheduler_metadata, Tensor? s_aux, Tensor? dynamic_causal=None,"
    ' float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()'
)
def cpu_attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor,
    sliding_window_size: int,
    block_table: Tensor,
    softcap: float = 0.0,
    scheduler_metadata: Tensor = None,
    s_aux: Tensor = None,
    dynamic_causal: Tensor = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Attention of a batch of requests, each over its own blocks."""
    _refuse(alibi_slopes is not None, "ALiBi")
    _refuse(softcap != 0, "a soft cap")
    _refuse(s_aux is not None, "attention sinks")
    _refuse(dynamic_causal is not None, "causality told by request")
    _refuse_quantised(kv_cache_dtype, k_scale, v_scale)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        if last > first:
            key = _gather(key_cache, block_table[row], lengths[row])
            value = _gather(value_cache, block_table[row], lengths[row])
            asked = query[first:last]
            found = attend(asked, key, value, scale, causal=causal, window=sliding_window_size)
            output[first:last] = found.reshape(output[first:last].shape)


@operator(
    f"_C::cpu_attention_with_kv_cache.left_right({_ATTENTION}, int left, int right,"
    " Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux,"
    ' float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()'
)
def cpu_attention_left_right(*args: Any) -> None:
    """The form before 0.25, where the window is two numbers: how far back, how far on."""
    head, (left, right), rest, scales = args[:9], args[9:11], args[11:15], args[15:]
    _refuse(right > 0, "a window that goes on behind the token")
    cpu_attention_with_kv_cache(*head, left + 1 if left >= 0 else -1, *rest, None, *scales)


@operator(
    "_C::compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions,"
    " Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()"
)
def compute_slot_mapping_kernel_impl(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Where each token's key and value go: block x block size + offset."""
    counts = query_start_loc.diff().long()
    rows = torch.arange(counts.shape[0]).repeat_interleave(counts)
    own = positions[: rows.shape[0]].long()
    blocks = block_table[rows, own // block_size].long()
    slot_mapping[: rows.shape[0]] = blocks * block_size + own % block_size


@operator(
    "_C_utils::init_cpu_threads_env(str cpu_ids) -> str",
    "_C::init_cpu_threads_env(str cpu_ids) -> str",
)
def init_cpu_threads_env(cpu_ids: str) -> str:
    """As many threads as cores are named (``0-1,4``); they are not bound to them."""
    count = 0
    for part in cpu_ids.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    torch.set_num_threads(count)
    return f"{count} threads, not bound: the operators are not the compiled ones"


@operator("_C::init_cpu_memory_env(SymInt[] node_ids) -> ()")
def init_cpu_memory_env(node_ids: list[int]) -> None:
    """Memory is taken where the system gives it."""


#: One that is dropped takes its operators along.
_LIBRARIES: list[Any] = []


def register() -> None:
    """Make the operators known to torch, once a process."""
    if _LIBRARIES:
        return
    os.environ.setdefault("LD_PRELOAD", WANTED_PRELOADED)
    for name in MOVED:
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, getattr(torch.cpu, name))
    for schema, work in OPERATORS:
        space, _, rest = schema.partition("::")
        library = torch.library.Library(space, "FRAGMENT")
        _LIBRARIES.append(library)
        library.define(rest)
        library.impl(rest.partition("(")[0], work, "CompositeExplicitAutograd")

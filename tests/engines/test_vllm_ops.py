"""The operators in plain PyTorch against the compiled ones of the vLLM that runs here, and who
takes whose place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.environment import packages_of
from engines.process import EngineError, run
from engines.vllm_cpu import environment
from engines.vllm_release import COMPILED, LEFT_OUT, operators, pins, release

FOLDER = Path(__file__).parent

#: Every operator once by us and once by vLLM's own library, on the same numbers. Prints the
#: largest difference of each.
COMPARE = """
import glob, json, sys, torch
sys.path.insert(0, sys.argv[1])
import vllm_ops as ours
torch.ops.load_library(sys.argv[2] + "/vllm/_C.abi3.so")
theirs = torch.ops._C
torch.manual_seed(1)
worst = {}

def compare(name, one, other):
    worst[name] = (one - other).abs().max().item()

def draw(*shape):
    return torch.randn(shape)

x, residual, weight = draw(5, 64), draw(5, 64), draw(64)
pair = [torch.empty_like(x) for _ in range(2)]
for work, out in zip((ours.rms_norm, theirs.rms_norm), pair):
    work(out, x, weight, 1e-5)
compare("rms_norm", *pair)
pair = [(x.clone(), residual.clone()) for _ in range(2)]
for work, (one, rest) in zip((ours.fused_add_rms_norm, theirs.fused_add_rms_norm), pair):
    work(one, rest, weight, 1e-5)
compare("fused_add_rms_norm", torch.cat(pair[0]), torch.cat(pair[1]))
pair = [torch.empty(5, 32) for _ in range(2)]
for work, out in zip((ours.silu_and_mul, theirs.silu_and_mul), pair):
    work(out, x)
compare("silu_and_mul", *pair)

positions, table = torch.tensor([0, 3, 7, 30, 31]), draw(32, 64)
for neox in (True, False):
    pair = [(draw(5, 4 * 64), draw(5, 2 * 64))] * 2
    pair = [(query.clone(), key.clone()) for query, key in pair]
    for work, (query, key) in zip((ours.rotary_embedding, theirs.rotary_embedding), pair):
        work(positions, query, key, 64, table, neox)
    compare(f"rotary_embedding {neox}", *(torch.cat(one, dim=1) for one in pair))

# Three requests over blocks of 32: a whole prompt, the second piece of one, one new token.
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 32
starts = torch.tensor([0, 40, 70, 71], dtype=torch.int32)
lengths = torch.tensor([40, 65, 90], dtype=torch.int32)
blocks = torch.tensor([[5, 2, 0], [7, 1, 3], [4, 6, 8]], dtype=torch.int32)
at = torch.cat([torch.arange(l - n, l) for l, n in zip(lengths.tolist(), (40, 30, 1))])
pair = [torch.full((71,), -1) for _ in range(2)]
for work, slots in zip(
    (ours.compute_slot_mapping_kernel_impl, theirs.compute_slot_mapping_kernel_impl), pair
):
    work(starts, at, blocks, slots, BLOCK)
compare("compute_slot_mapping_kernel_impl", *pair)

own_blocks = blocks.long()
before = []  # what earlier steps put into the caches: all positions of each request
for row, length in enumerate(lengths.tolist()):
    place = torch.arange(length)
    before.append(own_blocks[row, place // BLOCK] * BLOCK + place % BLOCK)
before = torch.cat(before)
keys, values = draw(before.shape[0], KV_HEADS, SIZE), draw(before.shape[0], KV_HEADS, SIZE)
query = draw(71, HEADS, SIZE)
for window in (-1, 20):
    pair = []
    for library in (ours, theirs):
        caches = [torch.zeros(9, KV_HEADS, BLOCK, SIZE) for _ in range(2)]
        library.cpu_attn_reshape_and_cache(keys, values, *caches, before, "vec")
        plan = library.get_scheduler_metadata(
            3, HEADS, KV_HEADS, SIZE, lengths, torch.float32, starts, True, window, "vec", True,
            None,
        )
        out = torch.zeros(71, HEADS, SIZE)
        library.cpu_attention_with_kv_cache(
            query, *caches, out, starts, lengths, 0.125, True, None, window, blocks, 0.0, plan,
            None, None,
        )
        pair.append(out)
    earlier = torch.zeros(71, HEADS, SIZE)
    caches = [torch.zeros(9, KV_HEADS, BLOCK, SIZE) for _ in range(2)]
    ours.cpu_attn_reshape_and_cache(keys, values, *caches, before, "vec")
    sides = (-1, -1) if window < 0 else (window - 1, 0)
    ours.cpu_attention_left_right(
        query, *caches, earlier, starts, lengths, 0.125, True, None, *sides, blocks, 0.0, None,
        None, 1.0, 1.0, "auto",
    )
    compare(f"cpu_attention_left_right {window}", earlier, pair[1])
    compare(f"cpu_attention_with_kv_cache {window}", *pair)
    worst[f"size {window}"] = -pair[0].abs().max().item()
print(json.dumps(worst))
"""

#: As a server does it: the name is imported, then the operator is called through torch.
STAND_IN = """
import sys
sys.path.insert(0, sys.argv[1])
import vllm_stubs
vllm_stubs.install()
sys.modules["vllm"] = type(sys)("vllm")
sys.modules["vllm"].__path__ = []
import vllm._C, vllm._C_AVX2, torch
from intel_extension_for_pytorch.llm.modules import PagedAttention
out = torch.empty(1, 2)
torch.ops._C.silu_and_mul(out, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
print(torch.ops._C_utils.init_cpu_threads_env("0-1,3"), out.tolist())
print(sorted(torch.ops._C.cpu_attention_with_kv_cache.overloads()))
for call in (
    lambda: torch.ops._C.gelu_new,
    lambda: torch.ops._C.rotary_embedding(out, out, None, 2, out, True, 1),
):
    try:
        call()
    except (AttributeError, NotImplementedError) as error:
        print(error)
"""


def in_environment(script: str, *words: str) -> str:
    return run([str(environment() / "bin" / "python"), "-c", script, str(FOLDER), *words], 120)


@pytest.mark.engine
def test_they_compute_what_the_compiled_ones_compute() -> None:
    worst = json.loads(in_environment(COMPARE, str(packages_of(environment()))))
    assert len(worst) == 12
    assert {name: value for name, value in worst.items() if value > 1e-4} == {}
    assert worst["size -1"] < -0.1  # it was not zeros that agreed


@pytest.mark.engine
def test_they_are_found_where_vllm_looks_and_what_is_not_there_raises_by_name() -> None:
    lines = in_environment(STAND_IN).splitlines()
    assert lines[0].startswith("3 threads, not bound")
    assert "[[2.19" in lines[0]  # silu(1) * 3
    assert lines[1] == "['default', 'left_right']"
    assert "gelu_new" in lines[2]
    assert lines[3] == "rotary_embedding with rope_dim_offset or inverse is not in vllm_ops.py"


def test_only_these_names_are_answered_for() -> None:
    script = (
        "import vllm_stubs as s, importlib.util as u, sys; s.install(); s.install()\n"
        "print([type(f).__name__ for f in sys.meta_path].count('OperatorsFinder'), "
        "u.find_spec('json').origin is not None, u.find_spec('vllm_of_nobody'), "
        "u.find_spec('intel_extension_for_pytorch') is not None, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "True", "None", "True", "False"]


def test_a_release_without_an_upper_bound_is_pinned_and_torch_never_asked_for(
    tmp_path: Path,
) -> None:
    assert pins("0.10.2") == ("transformers==4.55.4",)
    assert pins("0.25.1") == ()
    assert {"torch", "torchvision", "triton"} <= set(LEFT_OUT)
    assert operators(tmp_path) == COMPILED


@pytest.mark.engine
def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(EngineError, match="is no environment: it is left alone"):
        release("0.25.1", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

"""Puts vllm_ops.py in the place of vLLM's compiled operators.

Copied with it and vllm_ipex.py into the engine's environment and loaded there by a ``.pth`` file,
in every process of the server. Standard library only, and nothing happens until one of the names is
imported.

``intel_extension_for_pytorch`` is provided as far as the attention of 0.9 to 0.11 calls it: without
it they switch chunked prefill and the prefix cache off.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__all__ = ["COMPILED", "install"]

#: The names under which releases import their operators: one an instruction set from 0.20 on.
COMPILED = frozenset({"vllm._C", "vllm._C_AVX2", "vllm._C_AVX512"})
IPEX = "intel_extension_for_pytorch"
PACKAGES = frozenset({IPEX, f"{IPEX}.llm"})
ATTENTION = f"{IPEX}.llm.modules"
OPERATORS = "vllm_ops"
PAGED = "vllm_ipex"


class OperatorsLoader(Loader):
    """An empty module; the operators are registered with torch, where vLLM looks for them."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in COMPILED:
            import_module(OPERATORS).register()
        elif module.__name__ == ATTENTION:
            vars(module)["PagedAttention"] = import_module(PAGED).PagedAttention


class OperatorsFinder(MetaPathFinder):
    """Answers for these names only, and before their files are looked at."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in COMPILED or name in PACKAGES or name == ATTENTION:
            return ModuleSpec(name, OperatorsLoader(), is_package=name in PACKAGES)
        return None


def install() -> None:
    """Put the finder first, once."""
    if not any(isinstance(finder, OperatorsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OperatorsFinder())

"""What SGLang imports but does not use on a CPU, so that a machine without CUDA can start it.

Copied into the engine's environment and loaded by a ``.pth`` file there, in every process of the
server. Standard library only, and nothing happens until one of the names is imported.

- ``sgl_kernel``: compiled kernels for CUDA and AMX. Names exist; a call raises, so that a test
  never measures an empty function.
- ``IPython``: display in notebooks.
- ``torchvision._meta_registrations``: the PyPI build of torchvision wants CUDA libraries. Without
  its operators these registrations fail and the whole package with them; SGLang only needs its
  Python part, for the image settings of models that are not used here.
"""

from __future__ import annotations

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__all__ = ["STUBBED", "install"]

STUBBED = frozenset({"IPython", "sgl_kernel"})
EMPTY = frozenset({"torchvision._meta_registrations"})


class Absent:
    """Stands for anything in a stubbed package: has every attribute, and cannot be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self._name} is not there on this machine")


class Stub(types.ModuleType):
    """A package that has every name."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class StubLoader(Loader):
    """Makes a stub; there is nothing to execute in it."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class StubFinder(MetaPathFinder):
    """Answers for the stubbed names only."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in STUBBED or name in EMPTY:
            return ModuleSpec(name, StubLoader(), is_package=True)
        return None


def install() -> None:
    """Put the finder first, once."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StubFinder())

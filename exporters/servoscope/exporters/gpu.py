"""GPUs as NVML shows them. The only exporter module that uses a package (pynvml), and lazily.

One read never raises: no library, no driver, no device, a lost GPU and a field that the device
does not have are different answers, said in :class:`GpuReading` and ``GpuSample.missing``.
NVML calls block (a hung driver blocks for long): call :func:`read_gpus` from a worker thread.

Facts (NVML API reference): utilisation is a percentage and not there on MIG devices; power is
milliwatts, averaged over 1 s from Ampere on; clocks are MHz; pids are those of the host's pid
namespace, so a process in a container of its own does not find itself here.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from servoscope.exporters.gpu_device import (
    GPU_IS_LOST,
    DeviceFailedError,
    GpuLostError,
    error_code,
    read_device,
)
from servoscope.exporters.records import GpuSample

__all__ = [
    "MAX_GPUS",
    "GpuReading",
    "GpuState",
    "NvmlReader",
    "gpu_model_of",
    "gpu_reading",
    "read_gpus",
]

MAX_GPUS = 64

# nvmlReturn_t
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _VERSION_MISMATCH = 9, 12, 18


class GpuState(StrEnum):
    """What a read of all GPUs came to."""

    OK = "ok"
    NO_GPU = "no_gpu"  # the driver answers and has no device
    NO_LIBRARY = "no_library"  # pynvml or libnvidia-ml.so.1 is not installed
    NO_DRIVER = "no_driver"  # the library is there, the kernel driver is not loaded
    VERSION_MISMATCH = "version_mismatch"  # library and driver are of different versions
    LOST = "lost"  # at least one GPU fell off the bus; the others are in ``samples``
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """All GPUs at one moment, and why there are not more."""

    samples: tuple[GpuSample, ...] = ()
    state: GpuState = GpuState.OK
    detail: str = ""  # in words, with what to do next; empty when ok
    lost: tuple[int, ...] = ()  # indices of lost GPUs


_INIT_STATES = {
    _LIBRARY_NOT_FOUND: (GpuState.NO_LIBRARY, "libnvidia-ml.so.1 is not on this machine"),
    _DRIVER_NOT_LOADED: (GpuState.NO_DRIVER, "the NVIDIA kernel driver is not loaded"),
    _VERSION_MISMATCH: (
        GpuState.VERSION_MISMATCH,
        "libnvidia-ml.so.1 and the kernel driver are of different versions: reload or reboot",
    ),
}


def _load_pynvml() -> Any:
    return importlib.import_module("pynvml")


class NvmlReader:
    """Keeps NVML open between reads and opens it again after a loss. Safe for several threads."""

    def __init__(self, load: Callable[[], Any] = _load_pynvml) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._nvml: Any = None  # set while NVML is initialised

    def read(self) -> GpuReading:
        """Read every GPU. Never raises."""
        with self._lock:
            try:
                nvml = self._open()
            except ImportError:
                return GpuReading(
                    state=GpuState.NO_LIBRARY,
                    detail="pynvml is not installed: pip install nvidia-ml-py",
                )
            except _NvmlFailure as failure:
                return _not_opened(failure)
            reading = _read_all(nvml)
            if reading.state in (GpuState.LOST, GpuState.FAILED):
                self._close()  # a driver that was reloaded answers only after a new start
            return reading

    def close(self) -> None:
        """Let go of NVML; the next read opens it again."""
        with self._lock:
            self._close()

    def _open(self) -> Any:
        if self._nvml is None:
            nvml = self._load()
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                raise _NvmlFailure(error_code(error), str(error)) from error
            self._nvml = nvml
        return self._nvml

    def _close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # nothing is left to be closed


class _NvmlFailure(Exception):  # noqa: N818 - carries a code across one frame
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


_default_reader = NvmlReader()


def gpu_reading() -> GpuReading:
    """Read every GPU of this host with one reader for the whole process. Blocks; never raises."""
    return _default_reader.read()


def read_gpus() -> list[GpuSample]:
    """The samples of :func:`gpu_reading`; empty where there is none (it also says why)."""
    return list(gpu_reading().samples)


def gpu_model_of(pids: Iterable[int], samples: Sequence[GpuSample]) -> str:
    """Model of the GPUs that any of ``pids`` uses; ``none`` without one; a+b where they differ."""
    wanted = set(pids)
    models = sorted({s.gpu_model for s in samples if wanted.intersection(s.pids)})
    return "+".join(models) if models else "none"


def _not_opened(failure: _NvmlFailure) -> GpuReading:
    state, detail = _INIT_STATES.get(
        failure.code, (GpuState.FAILED, f"NVML does not start: {failure} ({failure.code})")
    )
    return GpuReading(state=state, detail=detail)


def _read_all(nvml: Any) -> GpuReading:
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        if error_code(error) == GPU_IS_LOST:
            return GpuReading(state=GpuState.LOST, detail="NVML counts no GPUs: one is lost")
        return GpuReading(state=GpuState.FAILED, detail=f"NVML counts no GPUs: {error}")
    samples: list[GpuSample] = []
    lost: list[int] = []
    failed: list[str] = []
    for index in range(min(count, MAX_GPUS)):
        try:
            samples.append(read_device(nvml, index))
        except GpuLostError:
            lost.append(index)
        except DeviceFailedError as failure:
            failed.append(f"GPU {index}: {failure}")
    if lost:
        state = GpuState.LOST
        failed.insert(0, f"GPU {', '.join(map(str, lost))} lost: it fell off the bus")
    elif failed:
        state = GpuState.FAILED
    else:
        state = GpuState.OK if count else GpuState.NO_GPU
    if count > MAX_GPUS:
        failed.append(f"{count} GPUs, of which {MAX_GPUS} are read")
    detail = "; ".join(failed) if count else "the driver has no device"
    return GpuReading(samples=tuple(samples), state=state, detail=detail, lost=tuple(lost))

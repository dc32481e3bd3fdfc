"""One GPU through pynvml: every field by itself, so that one that fails takes no other with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servoscope.exporters.records import GpuSample

__all__ = [
    "GPU_IS_LOST",
    "MAX_PIDS",
    "DeviceFailedError",
    "GpuLostError",
    "error_code",
    "read_device",
]

MAX_PIDS = 1_024  # of one GPU

# nvmlReturn_t
GPU_IS_LOST = 15
_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 3, 4, 13
_ARGUMENT_VERSION_MISMATCH = 25  # the structure's version is not one of this driver

_FIELD_WHY = {
    _NOT_SUPPORTED: "not supported by this GPU",
    _NO_PERMISSION: "no permission",
    _FUNCTION_NOT_FOUND: "the driver's library has no such function (missing symbol)",
}
_NOT_AVAILABLE = 0xFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE, as unsigned int

#: nvmlClocksEventReasons. Bit 0 (idle) is left out: an idle GPU is not being throttled.
_THROTTLE_BITS = {
    0x002: "application_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}


class GpuLostError(Exception):
    """The GPU fell off the bus: nothing more of it can be read."""


class DeviceFailedError(Exception):
    """NVML gives no handle for the GPU."""


class _NoFunctionError(Exception):
    """Neither pynvml nor the driver has any of the calls."""


def read_device(nvml: Any, index: int) -> GpuSample:
    """Read one GPU. Raises GpuLostError and DeviceFailedError, nothing else of NVML."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        if error_code(error) == GPU_IS_LOST:
            raise GpuLostError from error
        raise DeviceFailedError(str(error)) from error
    device = _Device(nvml, handle)
    used, total = device.memory()
    return GpuSample(
        index=index,
        uuid=device.field("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))) or f"#{index}",
        gpu_model=device.field("gpu_model", lambda: _text(nvml.nvmlDeviceGetName(handle)))
        or "unknown",
        pids=device.pids(),
        utilization_ratio=device.number(
            "utilization_ratio", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 100, 0.01
        ),
        memory_used_bytes=used,
        memory_total_bytes=total,
        power_watts=device.number(
            "power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle), 10_000_000, 0.001
        ),
        temperature_celsius=device.number(
            "temperature_celsius",
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            200,
        ),
        sm_clock_hertz=device.number(
            "sm_clock_hertz",
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            100_000,
            1e6,
        ),
        memory_clock_hertz=device.number(
            "memory_clock_hertz",
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            100_000,
            1e6,
        ),
        throttle_reasons=device.throttle_reasons(),
        missing=tuple(device.missing),
    )


class _Device:
    """One GPU being read: a field that fails is None, with the reason; a lost GPU ends it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing: list[tuple[str, str]] = []

    def field(self, name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._nvml.NVMLError as error:
            if error_code(error) == GPU_IS_LOST:
                raise GpuLostError from error
            why = _FIELD_WHY.get(error_code(error), str(error))
        except (_NoFunctionError, AttributeError):  # an old driver, an old pynvml
            why = _FIELD_WHY[_FUNCTION_NOT_FOUND]
        self.missing.append((name, why))
        return None

    def number(
        self, name: str, read: Callable[[], Any], most: int, factor: float = 1.0
    ) -> float | None:
        """A number of 0..``most`` in NVML's unit, times ``factor``; None for any other."""
        value = self.field(name, read)
        if value is None:
            return None
        if value == _NOT_AVAILABLE or not 0 <= value <= most:
            self.missing.append((name, f"impossible value {value}"))
            return None
        return float(value) * factor

    def first_of(self, *calls: tuple[str, dict[str, Any]]) -> Any:
        """The answer of the first call that pynvml and the driver both have: newest first."""
        nvml = self._nvml
        # Raised by pynvml for a missing symbol of an unversioned call; not an NVMLError.
        mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
        for name, options in calls:
            try:
                return getattr(nvml, name)(self._handle, **options)
            except nvml.NVMLError as error:
                if error_code(error) not in (_FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH):
                    raise
            except (AttributeError, mismatch):
                continue
        raise _NoFunctionError

    def memory(self) -> tuple[int | None, int | None]:
        """Used and total bytes. The second version of the call leaves reserved memory out."""
        second = {"version": getattr(self._nvml, "nvmlMemory_v2", None)}
        call = "nvmlDeviceGetMemoryInfo"
        info = self.field("memory_used_bytes", lambda: self.first_of((call, second), (call, {})))
        if info is None:
            self.missing.append(("memory_total_bytes", self.missing[-1][1]))
            return None, None
        used, total = int(info.used), int(info.total)
        if used > total:
            self.missing.append(("memory_used_bytes", f"impossible value {used} of {total}"))
            return None, total
        return used, total

    def pids(self) -> tuple[int, ...]:
        """Processes that compute on it, those under MPS included."""
        call = "nvmlDeviceGetComputeRunningProcesses"
        mps = "nvmlDeviceGetMPSComputeRunningProcesses"
        own = self.field("pids", lambda: self.first_of((call, {}), (f"{call}_v2", {}))) or []
        try:
            shared = self.first_of((mps, {}), (f"{mps}_v2", {}))
        except (self._nvml.NVMLError, _NoFunctionError):
            shared = []  # no MPS here: the common case, and no reason to speak of
        return tuple(sorted({int(process.pid) for process in [*own, *shared]})[:MAX_PIDS])

    def throttle_reasons(self) -> tuple[str, ...]:
        """Names of the reasons in force. The call was renamed in driver 535."""
        new, old = "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"
        bits = self.field(
            "throttle_reasons",
            lambda: self.first_of((f"nvmlDeviceGet{new}", {}), (f"nvmlDeviceGet{old}", {})),
        )
        return tuple(name for bit, name in _THROTTLE_BITS.items() if (bits or 0) & bit)


def error_code(error: Any) -> int:
    """nvmlReturn_t of an NVMLError."""
    return int(getattr(error, "value", -1))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

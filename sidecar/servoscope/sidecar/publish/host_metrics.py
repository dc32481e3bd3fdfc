"""CPU and memory of the engine's processes, and its GPUs: read from /proc and NVML, blocking."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from servoscope.exporters.cpu import process_stat
from servoscope.exporters.gpu import read_gpus

if TYPE_CHECKING:
    from servoscope.exporters.records import GpuSample
    from servoscope.sidecar.attach.target import Target
    from servoscope.sidecar.publish.families import Registry

__all__ = ["HostMetrics", "gpus_of", "process_rows"]

_GPU_GAUGES = (
    ("gpu_utilization_ratio", "utilization_ratio"),
    ("gpu_memory_used_bytes", "memory_used_bytes"),
    ("gpu_memory_total_bytes", "memory_total_bytes"),
    ("gpu_power_watts", "power_watts"),
    ("gpu_temperature_celsius", "temperature_celsius"),
    ("gpu_sm_clock_hertz", "sm_clock_hertz"),
    ("gpu_memory_clock_hertz", "memory_clock_hertz"),
)


def process_rows(target: Target) -> list[dict[str, Any]]:
    """What ``inspect`` shows of the processes: pid, role, CPU seconds and resident bytes."""
    rows = []
    for pid, role in target.pids.items():
        try:
            stat = process_stat(pid)
        except (OSError, ValueError):
            continue
        rows.append(
            {
                "pid": pid,
                "role": role,
                "cpu_seconds": stat.cpu_seconds,
                "resident_bytes": stat.resident_bytes,
            }
        )
    return rows


def gpus_of(target: Target, samples: list[GpuSample]) -> list[GpuSample]:
    """The GPUs that a process of the target uses."""
    return [s for s in samples if set(s.pids) & target.pids.keys()]


class HostMetrics:
    """Publishes them for one target."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._cpu: dict[tuple[int, str], float] = {}  # (pid, role) -> CPU seconds, last read
        self._ended: dict[str, float] = {}  # role -> CPU seconds of processes that are gone
        self._fleet: tuple[str, ...] = ()
        self.gpus: list[GpuSample] = []

    async def read(self, target: Target) -> None:
        """Read on a thread (NVML can block), publish here."""
        rows, samples = await asyncio.gather(
            asyncio.to_thread(process_rows, target), asyncio.to_thread(read_gpus)
        )
        self._publish_processes(target, rows)
        self.gpus = gpus_of(target, samples)
        self._publish_gpus(target)

    def _publish_processes(self, target: Target, rows: list[dict[str, Any]]) -> None:
        fleet = (
            target.engine, target.server, target.model_name, target.model_version,
            target.gpu_model,
        )  # fmt: skip
        if fleet != self._fleet:  # other labels: what was counted under the old ones ends
            self._registry.family("engine_process_cpu_seconds_total").clear()
            self._ended.clear()
            self._cpu.clear()
            self._fleet = fleet
        seconds = {(row["pid"], row["role"]): row["cpu_seconds"] for row in rows}
        for (pid, role), last in self._cpu.items():
            if (pid, role) not in seconds or seconds[pid, role] < last:
                self._ended[role] = self._ended.get(role, 0.0) + last
        self._cpu = seconds
        by_role = dict(self._ended)
        for (_, role), total in seconds.items():
            by_role[role] = by_role.get(role, 0.0) + total
        family = self._registry.family("engine_process_cpu_seconds_total")
        for role, total in by_role.items():
            family.raise_to((*fleet, role), total)
        resident: dict[tuple[str, ...], float] = {}
        for row in rows:
            key = (*fleet, row["role"])
            resident[key] = resident.get(key, 0.0) + row["resident_bytes"]
        self._registry.family("engine_process_resident_bytes").replace(resident)

    def _publish_gpus(self, target: Target) -> None:
        for name, field in _GPU_GAUGES:
            values: dict[tuple[str, ...], float] = {}
            for sample in self.gpus:
                value = getattr(sample, field)
                if value is not None:
                    labels = (target.engine, target.server, sample.gpu_model, sample.uuid)
                    values[labels] = float(value)
            self._registry.family(name).replace(values)
        reasons: dict[tuple[str, ...], float] = {
            (target.engine, target.server, s.gpu_model, s.uuid, reason): 1.0
            for s in self.gpus
            for reason in s.throttle_reasons
        }
        self._registry.family("gpu_throttle_reason").replace(reasons)

"""Processes and GPUs of the engine."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from servoscope.exporters.records import GpuSample
from servoscope.sidecar.attach.target import Target
from servoscope.sidecar.publish import host_metrics
from servoscope.sidecar.publish.families import Registry
from servoscope.sidecar.publish.host_metrics import HostMetrics, process_rows

TARGET = Target(
    url="http://127.0.0.1:1", host="127.0.0.1", port=1, server="127.0.0.1:1", engine="vllm",
    version="1", model_name="m", model_version="v", pids={os.getpid(): "api"},
)  # fmt: skip
FLEET = ("vllm", "127.0.0.1:1", "m", "v", "none")
GPU = GpuSample(
    index=0, uuid="GPU-1", gpu_model="H200", pids=(os.getpid(),), utilization_ratio=0.5,
    memory_used_bytes=10, throttle_reasons=("sw_power_cap",),
)  # fmt: skip


async def test_own_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_metrics, "read_gpus", list)
    registry = Registry()
    await HostMetrics(registry).read(TARGET)
    seconds = registry.family("engine_process_cpu_seconds_total").get((*FLEET, "api"))
    assert seconds is not None
    assert seconds > 0
    resident = registry.family("engine_process_resident_bytes").get((*FLEET, "api"))
    assert resident is not None
    assert resident > 1_000_000


async def test_cpu_seconds_never_fall_when_a_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"pid": 1, "role": "core", "cpu_seconds": 50.0, "resident_bytes": 5}]
    monkeypatch.setattr(host_metrics, "process_rows", lambda _target: rows)
    monkeypatch.setattr(host_metrics, "read_gpus", list)
    registry = Registry()
    metrics = HostMetrics(registry)
    family = registry.family("engine_process_cpu_seconds_total")
    await metrics.read(TARGET)
    rows[0] = {"pid": 2, "role": "core", "cpu_seconds": 1.0, "resident_bytes": 5}
    await metrics.read(TARGET)
    assert family.get((*FLEET, "core")) == 51.0
    rows[0] = {"pid": 2, "role": "core", "cpu_seconds": 0.5, "resident_bytes": 5}  # pid reused
    await metrics.read(TARGET)
    assert family.get((*FLEET, "core")) == 51.5
    rows.clear()
    await metrics.read(TARGET)
    assert family.get((*FLEET, "core")) == 51.5
    assert len(registry.family("engine_process_resident_bytes")) == 0


async def test_only_gpus_of_the_engine_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(GPU, uuid="GPU-2", pids=(1,))
    monkeypatch.setattr(host_metrics, "read_gpus", lambda: [GPU, other])
    registry = Registry()
    metrics = HostMetrics(registry)
    await metrics.read(TARGET)
    labels = ("vllm", "127.0.0.1:1", "H200", "GPU-1")
    assert registry.family("gpu_utilization_ratio").values() == {labels: 0.5}
    assert registry.family("gpu_power_watts").values() == {}  # not said: no zero
    assert registry.family("gpu_throttle_reason").values() == {(*labels, "sw_power_cap"): 1.0}
    assert metrics.gpus == [GPU]


def test_processes_that_are_gone_are_left_out() -> None:
    target = replace(TARGET, pids={2**22 + 5: "api"})
    assert process_rows(target) == []

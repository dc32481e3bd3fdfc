"""NVML through pynvml against a libnvidia-ml.so.1 of our own, compiled here: real ABI, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servoscope.exporters.gpu import GpuState, NvmlReader, gpu_model_of, gpu_reading, read_gpus
from servoscope.exporters.records import GpuSample

SOURCE = Path(__file__).parents[1] / "fixtures" / "nvml" / "fake_nvml.c"
CHILD = """
import dataclasses, json, os, sys
from servoscope.exporters.gpu import NvmlReader
reader = NvmlReader()
out = []
for step in json.loads(sys.argv[1]):
    os.environ.update(step)  # the library asks getenv at every call
    reading = reader.read()
    out.append(dataclasses.asdict(reading))
print(json.dumps(out))
"""

Read = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile the library, once for each set of flags."""
    made: dict[tuple[str, ...], Path] = {}

    def build(*flags: str) -> Path:
        if flags not in made:
            folder = tmp_path_factory.mktemp("nvml")
            target = folder / "libnvidia-ml.so.1"
            command = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
            subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)
            made[flags] = folder
        return made[flags]

    return build


@pytest.fixture
def read(libraries: Callable[..., Path]) -> Read:
    """Read in a process of its own, where the loader finds our library; one reading a step."""

    def run(*steps: dict[str, str], flags: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries(*flags))}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(steps or ({},))],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return run


def test_two_gpus_in_plain_units(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_PIDS": "300,20"})
    assert (reading["state"], reading["detail"], reading["lost"]) == ("ok", "", [])
    first, second = reading["samples"]
    assert first == {
        "index": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "gpu_model": "NVIDIA Test A",
        "pids": [20, 300],
        "utilization_ratio": pytest.approx(0.73),
        "memory_used_bytes": 40 << 30,  # without the reserved GiB
        "memory_total_bytes": 80 << 30,
        "power_watts": pytest.approx(512.345),
        "temperature_celsius": 61,
        "sm_clock_hertz": 1980e6,
        "memory_clock_hertz": 3201e6,
        "throttle_reasons": ["sw_power_cap"],  # bit 0, idle, is none
        "missing": [],
    }
    assert (second["index"], second["gpu_model"], second["pids"]) == (1, "NVIDIA Test B", [])


@pytest.mark.parametrize(
    ("code", "state", "detail"),
    [
        (9, GpuState.NO_DRIVER, "driver is not loaded"),
        (18, GpuState.VERSION_MISMATCH, "different versions"),
        (12, GpuState.NO_LIBRARY, "libnvidia-ml.so.1"),
        (4, GpuState.FAILED, "does not start"),
        (999, GpuState.FAILED, "(999)"),
    ],
)
def test_nvml_that_does_not_start(read: Read, code: int, state: GpuState, detail: str) -> None:
    broken, whole = read({"FAKE_NVML_INIT": str(code)}, {"FAKE_NVML_INIT": "0"})
    assert broken["state"] == state
    assert detail in broken["detail"]
    assert broken["samples"] == []
    assert whole["state"] == "ok"  # the next read starts it again
    assert len(whole["samples"]) == 2


def test_a_driver_without_a_gpu(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_COUNT": "0"})
    assert (reading["state"], reading["samples"]) == ("no_gpu", [])
    assert reading["detail"] == "the driver has no device"


def test_a_lost_gpu_does_not_hide_the_other_and_may_come_back(read: Read) -> None:
    before, lost, after = read({}, {"FAKE_NVML_LOST": "0"}, {"FAKE_NVML_LOST": "-1"})
    assert before["state"] == "ok"
    assert (lost["state"], lost["lost"]) == ("lost", [0])
    assert "GPU 0 lost" in lost["detail"]
    assert [s["index"] for s in lost["samples"]] == [1]
    assert (after["state"], len(after["samples"])) == ("ok", 2)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("UTILIZATION", {"utilization_ratio"}),
        ("POWER", {"power_watts"}),
        ("TEMPERATURE", {"temperature_celsius"}),
        ("CLOCK", {"sm_clock_hertz", "memory_clock_hertz"}),
        ("MEMORY", {"memory_used_bytes", "memory_total_bytes"}),
        ("REASONS", {"throttle_reasons"}),
        ("PROCESSES", {"pids"}),
    ],
)
def test_a_failing_field_is_none_with_a_reason(read: Read, call: str, fields: set[str]) -> None:
    whys = ("not supported by this GPU", "no permission", "Unknown Error")
    readings = read(*({f"FAKE_NVML_{call}": str(code)} for code in (3, 4, 999)))
    for reading, why in zip(readings, whys, strict=True):
        assert reading["state"] == "ok"
        for sample in reading["samples"]:
            missing = dict(map(tuple, sample["missing"]))
            assert missing.keys() == fields
            for field in fields:
                assert not sample[field]
                assert missing[field] in (why, "error 999")
            assert {n for n, v in sample.items() if v is None} == fields - {
                "pids",
                "throttle_reasons",
            }


def test_a_gpu_that_is_lost_between_two_calls(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_POWER": "15"})
    assert (reading["state"], reading["lost"], reading["samples"]) == ("lost", [0, 1], [])


def test_a_gpu_without_a_handle(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_HANDLE": "4"})
    assert reading["state"] == "failed"
    assert reading["detail"].startswith("GPU 0: ")


def test_name_and_uuid_may_be_missing(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_NAME": "999", "FAKE_NVML_UUID": "3"})
    first = reading["samples"][0]
    assert (first["gpu_model"], first["uuid"]) == ("unknown", "#0")
    assert {name for name, _ in first["missing"]} == {"gpu_model", "uuid"}


def test_values_that_cannot_be_are_refused(read: Read) -> None:
    (reading,) = read(
        {"FAKE_NVML_UTILIZATION_VALUE": "0xFFFFFFFF", "FAKE_NVML_USED_VALUE": str(90 << 30)}
    )
    first, second = reading["samples"]
    for sample in (first, second):
        missing = dict(map(tuple, sample["missing"]))
        assert sample["utilization_ratio"] is None or sample is second
        assert sample["memory_used_bytes"] is None
        assert sample["memory_total_bytes"] == 80 << 30
        assert "impossible value" in missing["memory_used_bytes"]
    assert "impossible value 4294967295" in dict(map(tuple, first["missing"]))["utilization_ratio"]


def test_an_old_driver_is_read_through_the_old_calls(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_REASONS_VALUE": "0x1e8"}, flags=("-DOLD_DRIVER",))
    first = reading["samples"][0]
    assert first["missing"] == []
    assert first["memory_used_bytes"] == 41 << 30  # the old call counts reserved memory in
    assert first["throttle_reasons"] == [
        "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "display_clocks",
    ]  # fmt: skip


def test_a_missing_symbol_is_a_state_of_its_own(read: Read) -> None:
    (reading,) = read(flags=("-DWITHOUT_POWER",))
    assert reading["state"] == "ok"
    for sample in reading["samples"]:
        assert sample["power_watts"] is None
        assert sample["missing"] == [
            ["power_watts", "the driver's library has no such function (missing symbol)"]
        ]


def test_a_thousand_processes_on_one_gpu(read: Read) -> None:
    (reading,) = read({"FAKE_NVML_PIDS": ",".join(map(str, range(1, 3_001)))})
    assert reading["samples"][0]["pids"] == list(range(1, 1_025))
    assert reading["state"] == "ok"


def test_without_pynvml() -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    reading = NvmlReader(load).read()
    assert (reading.state, reading.samples) == (GpuState.NO_LIBRARY, ())
    assert "nvidia-ml-py" in reading.detail


def test_a_pynvml_without_the_calls() -> None:
    class Error(Exception):
        value = 999

    ancient = SimpleNamespace(
        NVMLError=Error,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA Old",
    )
    reader = NvmlReader(lambda: ancient)
    reading = reader.read()
    assert reading.state is GpuState.OK
    (sample,) = reading.samples
    assert sample.gpu_model == "NVIDIA Old"
    assert sample.utilization_ratio is None
    assert "utilization_ratio" in dict(sample.missing)
    reader.close()
    assert reader.read() == reading


def test_the_readers_of_this_machine_agree() -> None:
    reading = gpu_reading()
    assert [s.uuid for s in read_gpus()] == [s.uuid for s in reading.samples]
    assert reading.state is GpuState.OK or reading.detail


@pytest.mark.parametrize(
    ("pids", "model"),
    [([1], "A"), ([2, 9], "A"), ([3], "B"), ([1, 3], "A+B"), ([4], "none"), ([], "none")],
)
def test_the_model_that_a_process_uses(pids: list[int], model: str) -> None:
    samples = [
        GpuSample(index=0, uuid="a", gpu_model="A", pids=(1,)),
        GpuSample(index=1, uuid="b", gpu_model="A", pids=(1, 2)),
        GpuSample(index=2, uuid="c", gpu_model="B", pids=(3,)),
    ]
    assert gpu_model_of(pids, samples) == model
    assert gpu_model_of(pids, []) == "none"

"""The targets for Prometheus are shared: nobody spoils or deletes those of others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from servoscope.cli.targets import file_sd_path, groups_of, read_collectors, write_targets
from servoscope.exporters.cpu import process_stat


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVOSCOPE_STATE", str(tmp_path))
    monkeypatch.setenv("SERVOSCOPE_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "run" / "sidecars").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _register(state: Path, server: str, port: int) -> Path:
    path = state / "run" / "sidecars" / f"{server}.json"
    start = process_stat(os.getpid()).start_seconds
    entry = {"pid": os.getpid(), "port": port, "server": server, "start_seconds": start}
    path.write_text(json.dumps(entry))
    return path


def _targets() -> list[str]:
    return [t for group in json.loads(file_sd_path().read_text()) for t in group["targets"]]


def test_the_union_is_written_and_only_ours_is_taken_out(
    state: Path, listening: str, unused_tcp_port: int
) -> None:
    first = _register(state, "127.0.0.1:8000", 9790)
    write_targets(listening)
    ours = f"127.0.0.1:{unused_tcp_port}"
    second = _register(state, "127.0.0.1:8001", 9791)
    write_targets(ours)
    assert _targets() == ["127.0.0.1:9790", "127.0.0.1:9791", listening, ours]
    second.unlink()
    write_targets(ours, leaving=True)
    assert _targets() == ["127.0.0.1:9790", listening]
    first.unlink()
    write_targets(listening, leaving=True)  # a collector that is not ours to end stays
    assert _targets() == [listening]


def test_the_file_goes_with_the_last(unused_tcp_port: int) -> None:
    ours = f"127.0.0.1:{unused_tcp_port}"
    write_targets(ours)
    assert _targets() == [ours]
    write_targets(ours, leaving=True)
    assert not file_sd_path().exists()
    write_targets(ours, leaving=True)


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '[{"labels": 1}]', "[" * 100_000])
def test_a_spoilt_file_is_replaced(text: str, unused_tcp_port: int) -> None:
    assert read_collectors(text) == []
    file_sd_path().write_text(text)
    write_targets(f"127.0.0.1:{unused_tcp_port}")
    assert len(_targets()) == 1


def test_groups_are_read_back() -> None:
    groups = groups_of(["a:1"], ["b:2", "b:2", "c:3"])
    assert [g["labels"]["job"] for g in groups] == ["servoscope-sidecar"] + [
        "servoscope-collector"
    ] * 2
    assert read_collectors(json.dumps(groups)) == ["b:2", "c:3"]

"""How a llama.cpp was started, from its process: flags, a few variables, /props."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from servoscope.exporters.llamacpp.settings import Settings
from servoscope.sidecar.attach import llamacpp, processes
from servoscope.sidecar.attach.llamacpp import SettingsOf, boot_values, started_with
from servoscope.sidecar.attach.target import Target


def target_of(*argv: str, **changes: Any) -> Target:
    target = Target(
        url="http://127.0.0.1:1", host="127.0.0.1", port=1, server="127.0.0.1:1",
        engine="llamacpp", version=None, model_name="m", model_version="v",
        pids={os.getpid(): "server"}, argv=argv, settings={"slots": 4},
    )  # fmt: skip
    return replace(target, **changes)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    told = {"LLAMA_ARG_UBATCH": "128", "LLAMA_API_KEY": "secret"}
    monkeypatch.setattr(processes, "process_environment", lambda _pid: told)
    return told


def test_flags_and_environment_and_props_tell_the_boot_values() -> None:
    target = target_of("llama-server", "-b", "1024", "-np", "4")
    assert started_with(target) == Settings(1024, 128, unified=False, sleeps=False)
    assert boot_values(target) == {
        "chunk_tokens": 1024, "ubatch_tokens": 128, "max_running_requests": 4,
    }  # fmt: skip


def test_of_a_process_that_cannot_be_seen_only_props_tell() -> None:
    assert boot_values(target_of(pids={})) == {"max_running_requests": 4}


def test_other_engines_are_not_looked_at() -> None:
    assert boot_values(target_of("llama-server", engine="vllm")) == {}


def test_the_answer_is_remembered_for_one_life_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Target] = []
    first, second = target_of("llama-server", "-b", "64"), target_of("llama-server", "-b", "32")
    now = [first]

    def started(target: Target) -> Settings:
        asked.append(target)
        return started_with(target)

    monkeypatch.setattr(llamacpp, "started_with", started)
    settings = SettingsOf(lambda: now[0])
    assert [settings().batch_tokens for _ in range(3)] == [64, 64, 64]
    now[0] = second
    assert settings().batch_tokens == 32
    assert asked == [first, second]

"""Finding out what serves at a URL, and saying what to do when it cannot be told."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from servoscope.sidecar.attach.target import AttachError, attach, identify, split_url


async def test_a_vllm_is_described(engine: Any, places: tuple[Path, Path]) -> None:
    target = await attach(engine.url)
    assert (target.engine, target.version, target.model_name) == ("vllm", "0.32.0", "tiny")
    assert (target.host, target.port) == ("127.0.0.1", engine.port)
    assert target.server == f"127.0.0.1:{engine.port}"
    assert target.pids[os.getpid()] == "api"
    assert target.uid == os.getuid()
    assert target.identity is not None
    assert places[1] in target.run_dirs
    assert target.supported
    assert engine.hits == {"/v1/models": 1, "/version": 1}  # each asked once


async def test_flags_overrule(engine: Any) -> None:
    target = await attach(engine.url, model_version="v9")
    assert target.model_version == "v9"
    target = await attach(engine.url, engine="llamacpp")
    assert target.engine == "llamacpp"


async def test_the_version_of_a_local_model_is_its_configs_hash(
    engine: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine.paths["/v1/models"] = {"data": [{"id": "m", "owned_by": "vllm", "root": str(tmp_path)}]}
    target = await attach(engine.url)
    assert target.model_version == hashlib.sha256(b"{}").hexdigest()[:12]


async def test_a_llamacpp_is_recognised(engine: Any) -> None:
    engine.paths = {
        "/v1/models": {"data": [{"id": "g", "owned_by": "llamacpp"}]},
        "/props": {"total_slots": 4, "build_info": "b11549-abc", "model_path": "/m.gguf"},
        "/version": None,
    }
    target = await attach(engine.url)
    assert (target.engine, target.version, target.model_name) == ("llamacpp", "b11549-abc", "g")


async def test_of_a_llamacpp_numbers_are_kept_and_its_chat_template_is_not(engine: Any) -> None:
    engine.paths = {
        "/v1/models": {"data": [{"id": "g", "owned_by": "llamacpp"}]},
        "/props": {
            "total_slots": 4, "build_info": "b0-unknown", "model_path": "/m.gguf",
            "default_generation_settings": {"n_ctx": 2048, "params": {"seed": 1}},
            "chat_template": "{% secret %}", "is_sleeping": False, "endpoint_slots": True,
        },
        "/version": None,
    }  # fmt: skip
    target = await attach(engine.url)
    assert target.version is None  # a build made outside git does not know its number
    assert target.settings == {
        "slots": 4, "slot_context_tokens": 2048, "sleeping": False, "slots_endpoint": True,
    }  # fmt: skip
    assert "secret" not in repr(target)


async def test_a_llamacpp_that_wants_a_key_for_props_is_one_all_the_same(engine: Any) -> None:
    engine.paths = {"/v1/models": {"data": [{"id": "g", "owned_by": "llamacpp"}]}}
    engine.statuses["/props"] = 401
    target = await attach(engine.url)
    assert (target.engine, target.version, target.settings) == ("llamacpp", None, {})


async def test_a_key_on_the_models_list_does_not_stop_it(engine: Any) -> None:
    engine.paths["/v1/models"] = None
    target = await attach(engine.url)
    assert (target.engine, target.version) == ("vllm", "0.32.0")


async def test_of_sglang_it_is_kept_how_it_was_started_and_nothing_else(engine: Any) -> None:
    engine.paths = {
        "/v1/models": {"data": [{"id": "s", "owned_by": "sglang"}]},
        "/version": None,
        "/server_info": {
            "version": "0.5.23", "api_key": "secret", "export_metrics_to_file": True,
            "export_metrics_to_file_dir": "/d", "log_requests": False, "weight_version": "w7",
        },
    }  # fmt: skip
    target = await attach(engine.url)
    assert (target.engine, target.version, target.supported) == ("sglang", "0.5.23", True)
    assert target.model_version == "w7"
    assert target.settings == {
        "export_metrics_to_file": True, "export_metrics_to_file_dir": "/d", "log_requests": False,
    }  # fmt: skip


async def test_a_kind_that_cannot_be_read_yet_is_named(engine: Any) -> None:
    with pytest.raises(AttachError, match="is tgi, which this version cannot read yet"):
        await attach(engine.url, engine="tgi")


async def test_something_else_is_told_from_an_engine(engine: Any) -> None:
    engine.paths = {"/v1/models": None, "/version": None}
    with pytest.raises(AttachError, match="--engine"):
        await attach(engine.url)


@pytest.mark.parametrize("answer", [[], {"data": []}, {"data": [5]}, {"data": "x"}, "x", 5])
async def test_strange_lists_do_not_crash(engine: Any, answer: Any) -> None:
    engine.paths["/v1/models"] = answer
    assert (await attach(engine.url)).engine == "vllm"


async def test_an_endless_answer_is_cut(engine: Any) -> None:
    engine.paths["/v1/models"] = {"data": ["x" * 3_000_000]}
    async with aiohttp.ClientSession() as session:
        answers = await identify(session, engine.url)
    assert answers is not None
    assert answers.model_name is None


async def test_nobody_there_says_what_to_check(unused_tcp_port: int) -> None:
    with pytest.raises(AttachError, match="Is the engine up") as caught:
        await attach(f"http://127.0.0.1:{unused_tcp_port}")
    assert "curl" in str(caught.value)
    assert "(Connection refused)" in str(caught.value)
    assert "plain http" not in str(caught.value)


async def test_https_that_nobody_speaks_is_asked_about(engine: Any) -> None:
    with pytest.raises(AttachError, match="does it speak https, not plain http"):
        await attach(engine.url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000/", ("http://127.0.0.1:8000", "127.0.0.1", 8000)),
        ("127.0.0.1:8000", ("http://127.0.0.1:8000", "127.0.0.1", 8000)),
        ("http://[::1]:8000/v1", ("http://[::1]:8000", "::1", 8000)),
        ("https://host", ("https://host:443", "host", 443)),
    ],
)
def test_urls(url: str, expected: tuple[str, str, int]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize("url", ["", "http://", "ftp://x", "http://x:99999", "unix:///x", "8000"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(AttachError):
        split_url(url)

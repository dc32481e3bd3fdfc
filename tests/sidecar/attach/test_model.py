"""Which version of a model a server serves, by precedence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from servoscope.sidecar.attach.model import (
    argument,
    config_hash,
    model_location,
    model_version,
    reported_version,
)

VLLM = ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/m", "--port=1")


def test_arguments_in_both_spellings_and_the_last_one_wins() -> None:
    argv = ("x", "--revision", "a", "--revision=b", "--other")
    assert argument(argv, "--revision") == "b"
    assert argument(argv, "--other") is None
    assert argument(argv, "--missing") is None


@pytest.mark.parametrize(
    ("argv", "root", "expected"),
    [
        (VLLM, "/r", "org/m"),
        (("/usr/bin/vllm", "serve", "org/m", "--port", "1"), "/r", "org/m"),
        (("vllm", "serve", "--model", "org/m"), None, "org/m"),
        (("llama-server", "-m", "/models/a.gguf"), None, "/models/a.gguf"),
        (("python", "-m", "package.module"), "/r", "/r"),
        ((), None, None),
    ],
)
def test_model_location(argv: tuple[str, ...], root: str | None, expected: str | None) -> None:
    assert model_location(argv, root) == expected


def test_precedence() -> None:
    argv = ("x", "--revision", "r1")
    assert model_version("flag", argv, "said", "hash") == "flag"
    assert model_version(None, argv, "said", "hash") == "r1"
    assert model_version(None, (), "said", "hash") == "said"
    assert model_version(None, (), None, "hash") == "hash"
    assert model_version(None, (), None, None) == "unknown"
    assert len(model_version("x" * 500, (), None, None)) <= 64


def test_reported_version() -> None:
    assert reported_version({"id": "m"}, {"weight_version": "w7"}) == "w7"
    assert reported_version({"weight_version": "default"}, {"sha": 5}) is None


def test_config_hash(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    expected = hashlib.sha256(b'{"a": 1}').hexdigest()[:12]
    assert config_hash(str(tmp_path)) == expected
    assert config_hash(tmp_path.name, tmp_path.parent) == expected
    assert config_hash(str(tmp_path / "config.json")) == expected
    assert config_hash(tmp_path.name, None) is None
    assert config_hash("org/model", tmp_path) is None
    assert config_hash(None) is None
    assert config_hash("/dev/zero") is None

"""Settings of the collector: defaults hold, and an error names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servoscope.collector.config import CollectorConfig, is_loopback


def test_defaults_are_valid_and_stay_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVOSCOPE_STATE", "/somewhere")
    config = CollectorConfig()
    config.validate()
    assert (config.listen, config.port) == ("127.0.0.1", 9780)
    assert config.database == Path("/somewhere/collector.duckdb")
    assert config.read_token() == ""


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"listen": ""}, "listen"),
        ({"listen": "0.0.0.0"}, "listen"),
        ({"listen": "::"}, "listen"),
        ({"listen": "collector.example"}, "listen"),
        ({"port": -1}, "port"),
        ({"port": 65_536}, "port"),
        ({"retention_days": 0}, "retention_days"),
        ({"retention_days": float("nan")}, "retention_days"),
        ({"max_body_bytes": 5}, "max_body_bytes"),
        ({"max_body_bytes": 2 << 20, "max_decoded_bytes": 1 << 20}, "max_decoded_bytes"),
        ({"max_pending_batches": 0}, "max_pending_batches"),
        ({"threads": 0}, "threads"),
        ({"database": Path("/")}, "database"),
        ({"allowed_hosts": ("http://a.example",)}, "allowed_hosts"),
        ({"allowed_hosts": ("a.example:9780",)}, "allowed_hosts"),
        ({"allowed_hosts": ("a",) * 101}, "allowed_hosts"),
    ],
)
def test_an_error_begins_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}: "):
        CollectorConfig(**changes).validate()


def test_beyond_this_host_a_token_is_asked_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    config = CollectorConfig(listen="0.0.0.0", token_file=str(token))
    config.validate()
    with pytest.raises(OSError, match="token_file: cannot read"):
        config.read_token()
    token.write_text("short")
    with pytest.raises(OSError, match=r"token_file: .* 16 ASCII"):
        config.read_token()
    token.write_text("0123456789abcdef\n")
    assert config.read_token() == "0123456789abcdef"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback

"""Settings: defaults hold, and a bad value names its key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from servoscope.sidecar.config import (
    ConfigError,
    ControlConfig,
    LabelsConfig,
    SidecarConfig,
    TypeRule,
)


def test_the_defaults_are_valid_and_listen_on_loopback() -> None:
    config = SidecarConfig()
    config.validate()
    assert config.listen == "127.0.0.1"
    assert config.collector_url == "http://127.0.0.1:9780"
    assert (config.tap, config.relay) == ("auto", None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", "0.0.0.0"),
        ("listen", "example.org"),
        ("listen", ""),
        ("port", -1),
        ("port", 70_000),
        ("port", True),
        ("port_attempts", 0),
        ("scrape_interval_seconds", 0),
        ("scrape_interval_seconds", float("nan")),
        ("scrape_timeout_seconds", "4"),
        ("scrape_max_bytes", 1),
        ("scrape_max_interval_seconds", 1.0),
        ("scrape_cost_ratio", 0),
        ("watch_interval_seconds", 0),
        ("tap", "maybe"),
        ("relay", "8000"),
        ("relay", "127.0.0.1:http"),
        ("relay", "10.0.0.1:8000"),
        ("otlp", "4318"),
        ("otlp", "10.0.0.1:4318"),
        ("request_file", "yes"),
        ("sglang_allow_prompt_text", 1),
        ("loads_interval_seconds", 0.01),
        ("loads_interval_seconds", -1),
        ("collector_url", "file:///etc/passwd"),
        ("push_queue_records", 0),
        ("push_batch_records", 20_001),
        ("push_attempts", 0),
        ("spool_max_bytes", -1),
        ("warmup_seconds", -1),
        ("long_prompt_tokens", 0),
    ],
)
def test_a_bad_value_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SidecarConfig(), **{key: value}).validate()
    assert caught.value.key == f"sidecar.{key}"
    assert str(caught.value).startswith(f"sidecar.{key}: ")


def test_other_addresses_are_possible_when_asked_for() -> None:
    replace(SidecarConfig(), listen="0.0.0.0", relay="0.0.0.0:8001", allow_remote=True).validate()


def test_what_sglang_tells_can_be_left_alone() -> None:
    replace(SidecarConfig(), loads_interval_seconds=0, request_file=False).validate()
    assert SidecarConfig(otlp="127.0.0.1:4318").otlp_address() == ("127.0.0.1", 4318)
    assert SidecarConfig().sglang_allow_prompt_text is False


def test_relay_address_takes_ipv6() -> None:
    assert SidecarConfig(relay="[::1]:8001").relay_address() == ("::1", 8001)


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (TypeRule(request_type="Not Good"), "sidecar.types[0].request_type"),
        (TypeRule(request_type="a", prompt_tokens=(10, 5)), "sidecar.types[0].prompt_tokens"),
        (TypeRule(request_type="a", output_tokens=(-1, 5)), "sidecar.types[0].output_tokens"),
    ],
)
def test_a_bad_rule_names_its_place(rule: TypeRule, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SidecarConfig(types=(rule,)).validate()
    assert caught.value.key == key


def test_caps_and_leases_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"labels\.max_tenants"):
        LabelsConfig(max_tenants=0).validate()
    with pytest.raises(ConfigError, match=r"control\.renew_seconds"):
        ControlConfig(lease_seconds=10.0, renew_seconds=9.0).validate()
    with pytest.raises(ConfigError, match=r"control\.lease_seconds"):
        ControlConfig(lease_seconds=3600.0).validate()
    with pytest.raises(ConfigError, match=r"control\.owner"):
        ControlConfig(owner="").validate()


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", "", "a/b", "x" * 300])
def test_a_host_that_is_no_name_is_told_with_its_place(name: str) -> None:
    good = ("gpu7.example.org", "*", "10.0.0.1", "[::1]")
    replace(SidecarConfig(), allowed_hosts=good).validate()
    with pytest.raises(ConfigError) as caught:
        replace(SidecarConfig(), allowed_hosts=(*good, name)).validate()
    assert caught.value.key == "sidecar.allowed_hosts[4]"


def test_too_many_hosts_are_told() -> None:
    with pytest.raises(ConfigError, match=r"sidecar\.allowed_hosts: more than 100"):
        replace(SidecarConfig(), allowed_hosts=("a",) * 101).validate()


def test_the_policy_and_the_probe_header_bind_nobody_by_default() -> None:
    assert not ControlConfig().obey_policy
    assert not LabelsConfig().trust_probe_header
    LabelsConfig(trust_probe_header=True).validate()
    with pytest.raises(ConfigError, match=r"control\.policy_seconds"):
        ControlConfig(policy_seconds=0.0).validate()
